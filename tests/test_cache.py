from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlookahead import cache as caches


@dataclasses.dataclass(frozen=True)
class Shapes:
    """A model that is only a cache; axes lie anywhere."""

    kind: str = "good"
    vocab_size: int = 4
    max_length: int | None = None

    def init_cache(self, batch, slots):
        leaves = {"k": jnp.zeros((batch, 2, 3, slots)), "v": [jnp.zeros((slots, 5, batch), jnp.bfloat16)]}
        if self.kind == "recurrent":
            leaves["state"] = jnp.zeros((batch, 7))
        if self.kind == "ring":
            leaves["k"] = jnp.zeros((batch, min(slots, 1024), 3))
        if self.kind == "rounded":
            leaves["k"] = jnp.zeros((batch, -(-slots // 384) * 384, 3))
        if self.kind == "shared":
            leaves["k"] = jnp.zeros((slots, 3))
        return leaves

    def forward(self, *args):
        raise NotImplementedError


def test_axes():
    assert caches.find_axes(Shapes()) == (caches.Axes(0, 3), caches.Axes(2, 0))


@pytest.mark.parametrize(("kind", "leaf"), [("recurrent", "state"), ("ring", "k"), ("rounded", "k"), ("shared", "k")])
def test_D7_caches_that_cannot_be_rolled_back(kind, leaf):
    with pytest.raises(caches.UnsupportedCacheError, match=rf"\['{leaf}'\]"):
        caches.find_axes(Shapes(kind))


def filled(model, batch, slots):
    """Every entry tells its leaf, row and slot."""
    axes = caches.find_axes(model)
    leaves, structure = jax.tree.flatten(model.init_cache(batch, slots))
    out = []
    for i, (leaf, axis) in enumerate(zip(leaves, axes, strict=True)):
        row = jnp.arange(batch).reshape([-1 if d == axis.batch else 1 for d in range(leaf.ndim)])
        slot = jnp.arange(slots).reshape([-1 if d == axis.slot else 1 for d in range(leaf.ndim)])
        out.append(jnp.broadcast_to(64 * i + 32 * row + slot, leaf.shape).astype(leaf.dtype))
    return jax.tree.unflatten(structure, out), axes


def rows(cache, axes):
    """`[leaf][row, slot]`, checked to be the same over the other axes."""
    out = []
    for leaf, axis in zip(jax.tree.leaves(cache), axes, strict=True):
        array = np.moveaxis(np.asarray(leaf, np.float32), (axis.batch, axis.slot), (0, 1))
        array = array.reshape(*array.shape[:2], -1)
        assert (array == array[..., :1]).all()
        out.append(array[..., 0].astype(int))
    return out


@pytest.mark.parametrize("batch", [1, 2])
def test_D4_D11_commit_moves_the_path_in_every_layer(batch):
    cache, axes = filled(Shapes(), batch, 24)
    lengths = np.array([3, 16])[:batch]
    path = np.array([[0, 3, 7, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7]])[:batch]
    moved = caches.commit(cache, axes, jnp.int32(16), jnp.asarray(lengths), jnp.asarray(path))
    for before, after in zip(rows(cache, axes), rows(moved, axes), strict=True):
        for row, (length, kept) in enumerate(zip(lengths, ([0, 3, 7], range(8)), strict=False)):
            wanted = [*before[row, :length], *(before[row, 16 + node] for node in kept)]
            assert after[row, : len(wanted)].tolist() == wanted


def test_grow_and_insert():
    cache, axes = filled(Shapes(), 2, 8)
    larger = caches.grow(cache, axes, 20)
    assert caches.num_slots(larger, axes) == 20
    for before, after in zip(rows(cache, axes), rows(larger, axes), strict=True):
        assert (after[:, :8] == before).all() and (after[:, 8:] == 0).all()
    both = caches.insert_row(larger, axes, cache, jnp.int32(1), jnp.int32(0))
    for before, after in zip(rows(cache, axes), rows(both, axes), strict=True):
        assert (after[0, :8] == before[1]).all() and (after[1, :8] == before[1]).all()


def test_slots_for():
    assert [caches.slots_for(n) for n in (1, 256, 257, 512, 1000)] == [256, 256, 512, 512, 1024]
