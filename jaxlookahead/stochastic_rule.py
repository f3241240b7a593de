"""Rejection of sampled drafts as the rule of `step.verify`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlookahead.accept import Decision, best_two
from jaxlookahead.sampling.arrays import SamplingArrays
from jaxlookahead.sampling.constraints import Constraint
from jaxlookahead.sampling.decide import logprob, process
from jaxlookahead.sampling.noise import Stream, stream_key
from jaxlookahead.sampling.processors import Context, Processor, advance, init_context
from jaxlookahead.stochastic import verify_children
from jaxlookahead.tree import ROOT, DraftTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """What sampled drafts were drawn from.

    A draft is a chain, its nodes first, in order; siblings of its nodes, leaves, may follow. The children of a node
    were drawn in the order in which they stand, without replacement.

    Attributes:
      q: `[R, D, V]` float32 probabilities of the children of the root and of each node of the chain but the last.
      rows: `[B]` int32, which of the `R` belongs to each row of the step.
      lenience: `[]` float32, see `stochastic.verify_children`.
      children: the most children of a node, static.
    """

    q: jax.Array
    rows: jax.Array
    lenience: jax.Array
    children: int = dataclasses.field(metadata={"static": True})


def stochastic_rule(
    tree: DraftTree,
    proposal: Proposal,
    arrays: SamplingArrays,
    history: jax.Array,
    prompt_length: jax.Array,
    length: jax.Array,
    *,
    processors: Sequence[Processor] = (),
    constraint: Constraint | None = None,
) -> Callable[[jax.Array], tuple[Callable[[Context, jax.Array], Decision], Context, Any]]:
    """Accepts sampled children with probability `min(1, p / q)` (Leviathan et al. 2022, Algorithm 1).

    The emitted tokens are distributed as those of `sampling_rule`, but depend on the draft; margins are NaN. In greedy
    rows the children count as fixed, and the tokens are those of `sampling_rule`.

    Args:
      tree: the trees that are verified.
      proposal: what they were drawn from.
      arrays: settings of the `B` rows.
      history: see `sampling_rule`, also for the other arguments.
      prompt_length: `[B]` int32.
      length: `[B]` int32.
      processors: the user's own, static.
      constraint: host callback, static.

    Returns:
      A rule for `step.verify`, with the scores of `sampling_rule`.
    """
    sampled = arrays.temperature > 0
    width, depth = tree.width, proposal.q.shape[1]

    def children_of(node: jax.Array) -> jax.Array:
        """Tokens `[B, C]` of the children, -1 where there are fewer."""
        nodes = jnp.arange(width, dtype=jnp.int32)
        mine = (tree.parents == node[:, None]) & (nodes > ROOT)
        first = jnp.sort(jnp.where(mine, nodes, width), axis=-1)[:, : proposal.children]
        tokens = jnp.take_along_axis(tree.tokens, jnp.minimum(first, width - 1), axis=1)
        return jnp.where(first < width, tokens, -1)

    def rule(logits: jax.Array) -> tuple[Callable[[Context, jax.Array], Decision], Context, Any]:
        def decide_at(context: Context, node: jax.Array) -> Decision:
            raw = jnp.take_along_axis(logits, node[:, None, None], axis=1)[:, 0].astype(jnp.float32)
            processed = process(arrays, context, raw, processors=processors, constraint=constraint)
            best, gap, bad = best_two(processed)
            bad |= ~jnp.isfinite(jnp.max(raw, axis=-1))
            p = jnp.where(sampled[:, None], jax.nn.softmax(processed), jax.nn.one_hot(best, processed.shape[-1]))
            q = proposal.q[proposal.rows, jnp.minimum(node, depth - 1)]
            key = stream_key(arrays.seed, arrays.request, context.position, Stream.ACCEPT)

            def verify(key: jax.Array, p: jax.Array, tokens: jax.Array, q: jax.Array, drawn: jax.Array) -> jax.Array:
                drawn = jnp.broadcast_to(drawn, tokens.shape)
                return verify_children(key, p, tokens, q, drawn, lenience=proposal.lenience).token

            token = jax.vmap(verify)(key, p, children_of(node), q, sampled)
            return Decision(
                token=token,
                margin=jnp.where(bad, 0, jnp.where(sampled, jnp.nan, gap)),
                bad=bad,
                scores={"logprob_raw": logprob(raw, token), "logprob": logprob(processed, token)},
            )

        return decide_at, init_context(arrays, history, prompt_length, length), advance

    return rule
