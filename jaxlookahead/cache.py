"""Caches with a scratch region: allocate, grow, insert rows, commit accepted slots.

The committed tokens of row `b` lie at slots `[0, length_b)`. A tree of `N` nodes is always written at the last `N`
slots; `commit` moves the accepted ones behind the committed ones. Nothing else of the cache is ever read.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlookahead.layout import as_it_lies
from jaxlookahead.models.protocol import Cache, Model

MIN_SLOTS = 256


class UnsupportedCacheError(ValueError):
    """The model's cache can't be rolled back, so drafts can't be verified with it."""


class Axes(NamedTuple):
    """Batch axis and slot axis of one leaf of a cache."""

    batch: int
    slot: int


@functools.lru_cache(maxsize=64)
def find_axes(model: Model) -> tuple[Axes, ...]:
    """Finds the axes of each leaf of the model's cache, in the order of `jax.tree.leaves`, from shapes alone.

    Raises:
      UnsupportedCacheError: names the first leaf without a batch axis or a slot axis of the size that was asked for.
    """

    def shapes(batch: int, slots: int) -> list[tuple[Any, tuple[int, ...]]]:
        cache = jax.eval_shape(lambda: model.init_cache(batch, slots))
        return [(path, leaf.shape) for path, leaf in jax.tree.leaves_with_path(cache)]

    # Far apart, so that a window of fixed size or a rounded size shows.
    small, large = 2 * MIN_SLOTS, 256 * MIN_SLOTS
    base, wide, long = shapes(2, small), shapes(3, small), shapes(2, large)
    axes = []
    for (path, shape), (_, shape_wide), (_, shape_long) in zip(base, wide, long, strict=True):
        name = jax.tree_util.keystr(path) or "cache"
        batch_axes = [i for i, (x, y) in enumerate(zip(shape, shape_wide, strict=True)) if (x, y) == (2, 3)]
        slot_axes = [i for i, (x, y) in enumerate(zip(shape, shape_long, strict=True)) if (x, y) == (small, large)]
        if len(batch_axes) != 1 or len(slot_axes) != 1:
            raise UnsupportedCacheError(
                f"cache leaf {name} of {type(model).__name__} has shape {shape} for 2 rows of {small} slots, "
                f"{shape_wide} for 3 rows and {shape_long} for {large} slots: rejected tokens can't be dropped from "
                "it. Give every leaf one batch axis and one axis of as many slots as asked for; recurrent states and "
                "ring buffers do not work"
            )
        axes.append(Axes(batch_axes[0], slot_axes[0]))
    return tuple(axes)


def num_slots(cache: Cache, axes: tuple[Axes, ...]) -> int:
    """`S` of a cache."""
    return jax.tree.leaves(cache)[0].shape[axes[0].slot]


def slots_for(tokens: int) -> int:
    """The cache size, a power of two, that holds `tokens` committed and scratch slots."""
    return max(MIN_SLOTS, 1 << (tokens - 1).bit_length())


def _map(function: Any, axes: tuple[Axes, ...], *caches: Cache) -> Cache:
    leaves = [jax.tree.leaves(cache) for cache in caches]
    out = [function(axis, *row) for axis, *row in zip(axes, *leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(caches[0]), out)


def grow(cache: Cache, axes: tuple[Axes, ...], slots: int) -> Cache:
    """Adds empty slots at the end, `slots` in all."""

    def pad(axis: Axes, leaf: jax.Array) -> jax.Array:
        widths = [(0, 0)] * leaf.ndim
        widths[axis.slot] = (0, slots - leaf.shape[axis.slot])
        return jnp.pad(leaf, widths)

    return _map(pad, axes, cache)


def insert_row(cache: Cache, axes: tuple[Axes, ...], other: Cache, source: jax.Array, row: jax.Array) -> Cache:
    """Copies row `source` of a cache with no more slots over the first slots of row `row`.

    Args:
      cache: the cache that is written.
      axes: from `find_axes`.
      other: a cache of the same model.
      source: `[]` int32.
      row: `[]` int32.
    """

    def put(axis: Axes, leaf: jax.Array, new: jax.Array) -> jax.Array:
        picked = lax.dynamic_slice_in_dim(new, source, 1, axis.batch)
        start = [jnp.int32(0)] * leaf.ndim
        start[axis.batch] = jnp.asarray(row, jnp.int32)
        return lax.dynamic_update_slice(leaf, picked.astype(leaf.dtype), start)

    return _map(put, axes, cache, other)


def commit(cache: Cache, axes: tuple[Axes, ...], start: jax.Array, lengths: jax.Array, path: jax.Array) -> Cache:
    """Moves the accepted scratch slots behind the committed ones.

    Args:
      cache: a cache with a verified tree at slots `[start, start + N)`.
      axes: from `find_axes`.
      start: `[]` int32, no less than any of `lengths`.
      lengths: `[B]` int32, committed tokens of each row, at most `S - N`.
      path: `[B, N]` int32, the nodes to keep, in order. Entries past the accepted count move slots that are never
        read, so any node will do.

    Returns:
      The cache with node `path[b, i]` at slot `lengths[b] + i`.
    """
    width = path.shape[1]

    def take(axis: Axes, leaf: jax.Array) -> jax.Array:
        scratch = lax.dynamic_slice_in_dim(leaf, start, width, axis=axis.slot)

        def take_row(row: jax.Array, nodes: jax.Array) -> jax.Array:
            return jnp.take(row, nodes, axis=_row_slot(axis), mode="clip")

        return jax.vmap(take_row, in_axes=(axis.batch, 0), out_axes=axis.batch)(scratch, path)

    def put(axis: Axes, leaf: jax.Array, kept: jax.Array) -> jax.Array:
        def put_row(row: jax.Array, new: jax.Array, length: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(row, new, length, _row_slot(axis))

        in_axes = (axis.batch, axis.batch, 0)
        return jax.vmap(put_row, in_axes=in_axes, out_axes=axis.batch)(leaf, kept, lengths)

    cache = jax.tree.map(as_it_lies, cache)
    # Fused with the write, the read would need a second cache.
    kept = lax.optimization_barrier(_map(take, axes, cache))
    return _map(put, axes, cache, kept)


def _row_slot(axis: Axes) -> int:
    """Slot axis of a leaf without its batch axis."""
    return axis.slot - (axis.batch < axis.slot)
