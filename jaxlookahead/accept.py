"""The accept walk: the longest path of a tree that the model itself would have produced.

At the current node the model's next token is decided, emitted, and the walk goes on to the child that holds it, if
there is one. For a fixed tree this accepts as much as any lossless rule can (`sum p(children)` at each node).
Deciding inside the walk lets every rule that depends on the tokens before it see the tokens actually emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxlookahead.struct import struct
from jaxlookahead.tree import ROOT, DraftTree, find_child

NO_TOKEN = -1

# Why a row ended, `Walk.finish`.
RUNNING, EOS, STOP, LENGTH, BAD_LOGITS = range(5)
FINISH_REASONS = {EOS: "eos", STOP: "stop", LENGTH: "length", BAD_LOGITS: "bad_logits"}


@struct
class StopRules:
    """When a row ends, besides its token limit. Padding is `NO_TOKEN`."""

    eos: jax.Array  # [B, E] int32 token ids that end a row
    sequences: jax.Array  # [B, Q, L] int32 token sequences that end a row, right aligned


@struct
class Progress:
    """How far each row is."""

    remaining: jax.Array  # [B] int32 tokens that may still be emitted; 0 where the row is empty or ended
    tail: jax.Array  # [B, L] int32 the last emitted tokens, right aligned, NO_TOKEN where there are fewer


@struct
class Decision:
    """The model's next token at one node of each row."""

    token: jax.Array  # [B] int32
    margin: jax.Array  # [B] float32, best minus second best of what was maximized
    bad: jax.Array  # [B] bool, nothing can be decided: NaN or inf among the logits, or no token left to choose
    scores: Any = None  # further [B] float32 arrays to report for each token, a dict or None


@struct
class Walk:
    """What was accepted. Entries past `counts` are `NO_TOKEN`, `ROOT` and 0."""

    tokens: jax.Array  # [B, N] int32 emitted tokens
    nodes: jax.Array  # [B, N] int32 the node that had proposed the token, ROOT where none had
    margins: jax.Array  # [B, N] float32
    scores: Any  # like `Decision.scores`, [B, N] each
    counts: jax.Array  # [B] int32 emitted tokens, also the number of nodes whose cache entries stay
    finish: jax.Array  # [B] int32 RUNNING, EOS, STOP, LENGTH or BAD_LOGITS
    progress: Progress

    @property
    def path(self) -> jax.Array:
        """`[B, N]` int32, the nodes at which the tokens were decided: the root, then the accepted ones."""
        return jnp.concatenate([jnp.full_like(self.nodes[:, :1], ROOT), self.nodes[:, :-1]], axis=1)


def best_two(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Argmax over the last axis, its margin over the second best, and whether there is no argmax.

    Ties go to the lowest index. A NaN or `inf` anywhere in a row, or a row of `-inf`, makes the row bad: the margin is
    0, the index a valid one all the same.

    Args:
      logits: `[..., V]` float.

    Returns:
      `[...]` int32 index, `[...]` float32 margin, `[...]` bool.
    """
    logits = logits.astype(jnp.float32)
    vocab_size = logits.shape[-1]
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    # Two plain reductions; XLA's argmax, a reduction over pairs, is not vectorized on CPU.
    best = jnp.max(logits, axis=-1, keepdims=True)
    index = jnp.min(jnp.where(logits == best, ids, vocab_size), axis=-1)
    second = jnp.max(jnp.where(ids == index[..., None], -jnp.inf, logits), axis=-1)
    best = best[..., 0]
    bad = ~jnp.isfinite(best)
    return jnp.minimum(index, vocab_size - 1), jnp.where(bad, 0, best - second), bad


def greedy(logits: jax.Array) -> Callable[[Any, jax.Array], Decision]:
    """Decides by argmax, for all nodes at once: the walk then runs over integers alone.

    Args:
      logits: `[B, N, V]`.
    """
    token, margin, bad = best_two(logits)

    def decide(context: Any, node: jax.Array) -> Decision:
        del context

        def at_node(x: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, node[:, None], axis=1)[:, 0]

        return Decision(token=at_node(token), margin=at_node(margin), bad=at_node(bad))

    return decide


def _finish(token: jax.Array, tail: jax.Array, remaining: jax.Array, stops: StopRules) -> jax.Array:
    eos = jnp.any(stops.eos == token[:, None], axis=-1)
    wanted = stops.sequences
    matches = jnp.all((wanted == NO_TOKEN) | (wanted == tail[:, None, :]), axis=-1)
    stop = jnp.any(matches & (wanted[..., -1] != NO_TOKEN), axis=-1)
    finish = jnp.where(remaining <= 0, LENGTH, RUNNING)
    finish = jnp.where(stop, STOP, finish)
    return jnp.where(eos, EOS, finish).astype(jnp.int32)


def walk(
    tree: DraftTree,
    progress: Progress,
    stops: StopRules,
    decide: Callable[[Any, jax.Array], Decision],
    *,
    context: Any = None,
    advance: Callable[[Any, jax.Array, jax.Array], Any] | None = None,
) -> Walk:
    """Walks each tree from its root as far as the model agrees.

    Args:
      tree: the verified trees.
      progress: rows with `remaining` 0 emit nothing.
      stops: end the walk, and the row, after the token that completes them.
      decide: `(context, node [B]) -> Decision`.
      context: what `decide` needs to know of the tokens emitted so far, any pytree.
      advance: `(context, token [B], active [B]) -> context`, the context after `token` was emitted in active rows.

    Returns:
      The emitted tokens; at least one for every row with `remaining` above 0, unless its logits are bad.
    """
    batch, width = tree.tokens.shape
    first = jnp.zeros(batch, jnp.int32)
    scores = jax.tree.map(lambda x: jnp.zeros((batch, width), x.dtype), jax.eval_shape(decide, context, first).scores)
    start = Walk(
        tokens=jnp.full((batch, width), NO_TOKEN, jnp.int32),
        nodes=jnp.full((batch, width), ROOT, jnp.int32),
        margins=jnp.zeros((batch, width), jnp.float32),
        scores=scores,
        counts=jnp.zeros(batch, jnp.int32),
        finish=jnp.full(batch, RUNNING, jnp.int32),
        progress=progress,
    )

    def going(state: tuple[Any, ...]) -> jax.Array:
        step, _, alive, _, _ = state
        return (step < width) & jnp.any(alive)

    def emit(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, node, alive, context, done = state
        decision = decide(context, node)
        bad = alive & decision.bad
        active = alive & ~decision.bad
        token = decision.token
        child = find_child(tree, node, token)

        def put(values: jax.Array, new: jax.Array) -> jax.Array:
            old = lax.dynamic_index_in_dim(values, step, axis=1, keepdims=False)
            return lax.dynamic_update_index_in_dim(values, jnp.where(active, new, old), step, axis=1)

        remaining = done.progress.remaining - active
        tail = jnp.concatenate([done.progress.tail[:, 1:], token[:, None]], axis=1)
        tail = jnp.where(active[:, None], tail, done.progress.tail)
        finish = jnp.where(active, _finish(token, tail, remaining, stops), done.finish)
        finish = jnp.where(bad, BAD_LOGITS, finish)
        remaining = jnp.where((finish != RUNNING) & alive, 0, remaining)
        done = Walk(
            tokens=put(done.tokens, token),
            nodes=put(done.nodes, child),
            margins=put(done.margins, decision.margin),
            scores=jax.tree.map(put, done.scores, decision.scores),
            counts=done.counts + active,
            finish=finish,
            progress=Progress(remaining=remaining, tail=tail),
        )
        if advance is not None:
            context = advance(context, token, active)
        alive = active & (child != ROOT) & (finish == RUNNING)
        return step + 1, child, alive, context, done

    state = (jnp.int32(0), first, progress.remaining > 0, context, start)
    return lax.while_loop(going, emit, state)[-1]
