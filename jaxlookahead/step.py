"""One decoding step: score a tree, walk it, commit the accepted slots. Pure; for use inside any `jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxlookahead import accept
from jaxlookahead import cache as caches
from jaxlookahead.accept import NO_TOKEN, Decision, Progress, StopRules, Walk
from jaxlookahead.models.protocol import Cache, Model, Params
from jaxlookahead.struct import struct
from jaxlookahead.tree import DraftTree, ancestor_mask, depths

# From the logits [B, N, V] of a tree to the arguments `decide`, `context` and `advance` of `accept.walk`.
Rule = Callable[
    [jax.Array],
    tuple[Callable[[Any, jax.Array], Decision], Any, Callable[[Any, jax.Array, jax.Array], Any] | None],
]


def greedy_rule(logits: jax.Array) -> tuple[Callable[[Any, jax.Array], Decision], None, None]:
    """Plain greedy decoding: the most likely token, the lowest id among equals."""
    return accept.greedy(logits), None, None


@struct
class Verified:
    """The outcome of a step."""

    walk: Walk
    cache: Cache
    lengths: jax.Array  # [B] int32 committed tokens, the last emitted one not among them
    logits: jax.Array  # [B, N, V] of every node


def tree_mask(lengths: jax.Array, ancestors: jax.Array, slots: int) -> jax.Array:
    """Attention mask of a tree at the last `N` of `slots` slots: the row's committed tokens and the node's ancestors.

    Args:
      lengths: `[B]` int32.
      ancestors: `[B, N, N]` bool, from `ancestor_mask`.
      slots: `S`.

    Returns:
      `[B, N, S]` bool.
    """
    batch, width, _ = ancestors.shape
    prefix = jnp.arange(slots - width) < lengths[:, None]
    prefix = jnp.broadcast_to(prefix[:, None, :], (batch, width, slots - width))
    return jnp.concatenate([prefix, ancestors], axis=-1)


def no_stops(batch: int) -> StopRules:
    """Rules that never end a row."""
    return StopRules(
        eos=jnp.full((batch, 1), NO_TOKEN, jnp.int32),
        sequences=jnp.full((batch, 1, 1), NO_TOKEN, jnp.int32),
    )


def verify(
    model: Model,
    params: Params,
    cache: Cache,
    lengths: jax.Array,
    tree: DraftTree,
    *,
    progress: Progress | None = None,
    stops: StopRules | None = None,
    rule: Rule = greedy_rule,
    commit: Callable[..., Cache] = caches.commit,
) -> Verified:
    """Scores a tree in one forward pass and keeps the longest path that the model itself would have produced.

    Pure and traceable: call it inside your own `jit` with `model` and `rule` fixed, and donate the cache.

    Args:
      model: see `jaxlookahead.models.protocol.Model`.
      params: the model's parameters.
      cache: `S` slots, with the tokens of row `b` at slots `[0, lengths[b])`.
      lengths: `[B]` int32, at most `S - N` (and so that no node lies past `model.max_length`).
      tree: `[B, N]`; the root is the row's newest token, which the cache does not hold.
      progress: token limits and stop-sequence tails; without it every row may emit up to `N` tokens.
      stops: end-of-sequence ids and stop sequences; none without it.
      rule: how the next token is decided; greedy by default.
      commit: a function like `cache.commit`, for a cache that lies on several devices: `mesh.commit_on_mesh`.

    Returns:
      `Verified`. Row `b` emitted `walk.tokens[b, :walk.counts[b]]`; `lengths` grew by `walk.counts`.
    """
    batch, width = tree.tokens.shape
    axes = caches.find_axes(model)
    slots = caches.num_slots(cache, axes)
    if stops is None:
        stops = no_stops(batch)
    if progress is None:
        progress = Progress(
            remaining=jnp.full(batch, width + 1, jnp.int32),
            tail=jnp.full((batch, stops.sequences.shape[-1]), NO_TOKEN, jnp.int32),
        )
    with jax.named_scope("tree"):
        ancestors = ancestor_mask(tree.parents)
        positions = lengths[:, None] + depths(ancestors)
        mask = tree_mask(lengths, ancestors, slots)
    with jax.named_scope("forward"):
        start = jnp.int32(slots - width)
        logits, cache = model.forward(params, tree.tokens, positions, mask, cache, start)
    with jax.named_scope("accept"):
        decide, context, advance = rule(logits)
        walk = accept.walk(tree, progress, stops, decide, context=context, advance=advance)
    with jax.named_scope("commit"):
        # Counts are never negative, but XLA does not know: the write has to wait for the walk, and so for the last
        # read of the cache. Without that, and where there is only the root to keep, XLA would write to a copy.
        behind = lengths + jnp.minimum(walk.counts, 0)
        cache = commit(cache, axes, start, behind, walk.path)
    return Verified(walk=walk, cache=cache, lengths=lengths + walk.counts, logits=logits)


def prefill(model: Model, params: Params, cache: Cache, tokens: jax.Array, start: jax.Array) -> tuple[jax.Array, Cache]:
    """Scores a chunk of prompts that begin at slot 0, right padded.

    Args:
      model: the model.
      params: its parameters.
      cache: holds the chunks before this one at slots `[0, start)`.
      tokens: `[B, T]` int32; what stands at padding is of no account as long as it lies past the row's prompt.
      start: `[]` int32, position of the chunk's first token.

    Returns:
      Logits `[B, T, V]` and the cache. Where the logits are not used, `jit` drops the output head.
    """
    batch, size = tokens.shape
    slots = caches.num_slots(cache, caches.find_axes(model))
    positions = start + jnp.arange(size, dtype=jnp.int32)
    mask = jnp.arange(slots) <= positions[:, None]
    return model.forward(
        params,
        tokens,
        jnp.broadcast_to(positions, (batch, size)),
        jnp.broadcast_to(mask, (batch, size, slots)),
        cache,
        start,
    )
