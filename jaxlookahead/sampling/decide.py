"""The choice of the next token: argmax of the processed logits, plus keyed noise in rows that sample."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxlookahead.accept import Decision, best_two
from jaxlookahead.sampling.arrays import SamplingArrays
from jaxlookahead.sampling.constraints import Constraint
from jaxlookahead.sampling.filters import apply_filters, boundary_distance, is_filtered
from jaxlookahead.sampling.noise import token_noise
from jaxlookahead.sampling.processors import Context, Processor, apply_processors, needs_history

# Log-probabilities that a decision reports, by name in `Decision.scores`.
LOGPROBS = ("logprob_raw", "logprob")


def _log_total(logits: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def logprob(logits: jax.Array, token: jax.Array) -> jax.Array:
    index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    picked = jnp.max(jnp.where(index == token[..., None], logits, -jnp.inf), axis=-1)
    return picked - _log_total(logits)[..., 0]


def is_plain(arrays: SamplingArrays) -> jax.Array:
    """`[B]` bool: greedy rows without a processor, for which `decide` equals `decide_greedy`."""
    return ~needs_history(arrays) & ~(arrays.temperature > 0)


def decide_greedy(logits: jax.Array) -> Decision:
    """Decides rows that need no settings.

    Args:
      logits: `[..., V]`, any float dtype and any number of leading axes, such as the nodes of a tree.

    Returns:
      `Decision` with arrays of the leading shape.
    """
    logits = logits.astype(jnp.float32)
    token, margin, bad = best_two(logits)
    return Decision(token=token, margin=margin, bad=bad, scores=dict.fromkeys(LOGPROBS, logprob(logits, token)))


def process(
    arrays: SamplingArrays,
    context: Context,
    logits: jax.Array,
    *,
    processors: Sequence[Processor] = (),
    constraint: Constraint | None = None,
) -> jax.Array:
    """Applies all processors, temperature and filters included.

    Args:
      arrays: settings of `B` rows.
      context: their tokens so far.
      logits: `[B, V]`, any float dtype.
      processors: the user's own, static.
      constraint: host callback, static.

    Returns:
      `[B, V]` float32, -inf for removed tokens. Greedy rows aren't divided or filtered.
    """
    shaped = _shape(arrays, context, logits.astype(jnp.float32), processors, constraint)
    return lax.cond((arrays.temperature > 0).any(), lambda: apply_filters(arrays, shaped)[1], lambda: shaped)


def _shape(
    arrays: SamplingArrays,
    context: Context,
    logits: jax.Array,
    processors: Sequence[Processor],
    constraint: Constraint | None,
) -> jax.Array:
    if logits.shape != (arrays.request.shape[0], arrays.vocab_size):
        raise ValueError(
            f"logits: shape {logits.shape}, but the settings were packed for "
            f"{(arrays.request.shape[0], arrays.vocab_size)}"
        )
    return apply_processors(arrays, context, logits, processors=processors, constraint=constraint)


def decide(
    arrays: SamplingArrays,
    context: Context,
    logits: jax.Array,
    *,
    processors: Sequence[Processor] = (),
    constraint: Constraint | None = None,
) -> Decision:
    """Decides the next token of every row.

    Greedy rows take the argmax of the processed logits, sampled rows that of processed logits + Gumbel noise
    keyed by `(seed, request, position)`, which is a sample of their distribution. Ties go to the smaller
    token id.

    Args:
      arrays: settings of `B` rows.
      context: their tokens so far.
      logits: `[B, V]`, any float dtype.
      processors: the user's own, static.
      constraint: host callback, static.

    Returns:
      `Decision`. Its margin is the smallest change in processed logits that could have chosen another token: the gap
      between the best and the second best of what was compared, or the distance to a boundary of top-k, top-p or
      min-p where that decided; inf where only one token was left. Its scores are the token's log-probabilities under
      the model's own logits (`logprob_raw`) and under the processed ones (`logprob`); in greedy rows temperature and
      filters don't apply.
    """
    logits = logits.astype(jnp.float32)
    shaped = _shape(arrays, context, logits, processors, constraint)

    def greedy() -> tuple[jax.Array, ...]:
        return *best_two(shaped), shaped

    def sampled() -> tuple[jax.Array, ...]:
        scaled, filtered, cut = apply_filters(arrays, shaped)
        noise = token_noise(arrays.seed, arrays.request, context.position, arrays.vocab_size)
        noise = jnp.where((arrays.temperature > 0)[:, None], noise, 0)
        token, gap, bad = best_two(filtered + noise)
        margin = lax.cond(
            is_filtered(arrays).any(),
            lambda: jnp.minimum(gap, boundary_distance(arrays, scaled, cut, scaled + noise, token[:, None])),
            lambda: gap,
        )
        return token, margin, bad, filtered

    token, margin, bad, processed = lax.cond((arrays.temperature > 0).any(), sampled, greedy)
    # A processor may have removed the model's own NaN.
    bad |= ~jnp.isfinite(jnp.max(logits, axis=-1))
    return Decision(
        token=token,
        margin=jnp.where(bad, 0, margin),
        bad=bad,
        scores={"logprob_raw": logprob(logits, token), "logprob": logprob(processed, token)},
    )


def top_logprobs(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Lists the most probable tokens, raw or processed as `logits` are.

    Args:
      logits: `[..., V]`.
      count: how many, static.

    Returns:
      `[..., count]` int32 tokens in falling order, ties by smaller id, and their `[..., count]` float32
      log-probabilities.
    """
    logits = logits.astype(jnp.float32)
    values, tokens = lax.top_k(logits, count)
    return tokens, values - _log_total(logits)
