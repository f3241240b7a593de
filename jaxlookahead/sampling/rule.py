"""Sampling as the rule of `step.verify`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxlookahead.accept import Decision
from jaxlookahead.sampling.arrays import SamplingArrays
from jaxlookahead.sampling.constraints import Constraint
from jaxlookahead.sampling.decide import decide
from jaxlookahead.sampling.processors import Context, Processor, advance, init_context


def sampling_rule(
    arrays: SamplingArrays,
    history: jax.Array,
    prompt_length: jax.Array,
    length: jax.Array,
    *,
    processors: Sequence[Processor] = (),
    constraint: Constraint | None = None,
) -> Callable[[jax.Array], tuple[Callable[[Context, jax.Array], Decision], Context, Any]]:
    """Decides node by node, so that every processor sees the tokens emitted before the node.

    Args:
      arrays: settings of the `B` rows.
      history: `[B, L]` int32, prompt and output of each row, the root of its tree included; with room for `N` more.
      prompt_length: `[B]` int32.
      length: `[B]` int32, prompt and output, the root included.
      processors: the user's own, static.
      constraint: host callback, static.

    Returns:
      A rule for `step.verify`. `Walk.scores` holds the log-probability of each token under the model's own logits
      (`logprob_raw`) and under the processed ones (`logprob`).
    """

    def rule(logits: jax.Array) -> tuple[Callable[[Context, jax.Array], Decision], Context, Any]:
        def decide_at(context: Context, node: jax.Array) -> Decision:
            at_node = jnp.take_along_axis(logits, node[:, None, None], axis=1)[:, 0]
            return decide(arrays, context, at_node, processors=processors, constraint=constraint)

        return decide_at, init_context(arrays, history, prompt_length, length), advance

    return rule
