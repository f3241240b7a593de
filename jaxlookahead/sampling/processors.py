"""Processors that depend on the tokens so far: penalties, bans, n-gram rules, forced tokens.

Order, as `transformers` builds it in `GenerationMixin._get_logits_processor`: logit bias, repetition penalty,
(then frequency and presence penalty, which `transformers` lacks, as OpenAI and vLLM define them), no-repeat
n-grams, banned sequences, minimum length, constraint (`prefix_allowed_tokens_fn` there), forced tokens, the
user's own. Temperature, top-k, top-p and min-p follow in `filters`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxlookahead.sampling.arrays import NO_TOKEN, SamplingArrays
from jaxlookahead.sampling.constraints import Constraint, constraint_mask

# (history [B, L] int32, length [B] int32, logits [B, V] float32) -> logits [B, V]. Entries of `history` from
# `length` on are undefined.
Processor = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What the processors know of the tokens so far. May live for one step or be carried through all of them.

    Attributes:
      history: `[B, L]` int32, prompt and output, padded on the right.
      prompt_length: `[B]` int32.
      length: `[B]` int32, prompt and output.
      in_prompt: `[B, V]` bool, whether the prompt holds the token. False throughout where no row has a
        penalty.
      counts: `[B, V]` int32, occurrences in the output. Likewise.
    """

    history: jax.Array
    prompt_length: jax.Array
    length: jax.Array
    in_prompt: jax.Array
    counts: jax.Array

    @property
    def position(self) -> jax.Array:
        """`[B]` int32, the number of tokens emitted so far: the output index of the next one."""
        return self.length - self.prompt_length


def _penalised(arrays: SamplingArrays) -> jax.Array:
    return (arrays.repetition_penalty != 1) | (arrays.presence_penalty != 0) | (arrays.frequency_penalty != 0)


def needs_history(arrays: SamplingArrays) -> jax.Array:
    """`[B]` bool: rows with a processor of this module, user's own and constraints not counted."""
    return (
        _penalised(arrays)
        | (arrays.bias_tokens != NO_TOKEN).any(-1)
        | (arrays.sequence_lengths > 0).any(-1)
        | (arrays.no_repeat_ngram > 0)
        | (arrays.min_new_tokens > 0)
        | (arrays.forced_indices >= 0).any(-1)
    )


def init_context(arrays: SamplingArrays, history: jax.Array, prompt_length: jax.Array, length: jax.Array) -> Context:
    """Builds the context of rows with known tokens.

    Args:
      arrays: settings of `B` rows.
      history: `[B, L]` int32, prompt and output so far. `L` must leave room for the tokens that `advance`
        will add; tokens beyond it aren't seen by later processors.
      prompt_length: `[B]` int32.
      length: `[B]` int32, prompt and output.
    """
    history = jnp.asarray(history, jnp.int32)
    prompt_length, length = jnp.asarray(prompt_length, jnp.int32), jnp.asarray(length, jnp.int32)
    rows, vocab_size = history.shape[0], arrays.vocab_size

    def count() -> tuple[jax.Array, jax.Array]:
        slot = lax.broadcasted_iota(jnp.int32, history.shape, 1)
        known = (slot < length[:, None]) & (history >= 0)
        prompt = slot < prompt_length[:, None]
        in_prompt = jax.vmap(lambda ids: jnp.zeros(vocab_size, bool).at[ids].set(True, mode="drop"))(
            jnp.where(known & prompt, history, NO_TOKEN)
        )
        counts = jax.vmap(lambda ids: jnp.zeros(vocab_size, jnp.int32).at[ids].add(1, mode="drop"))(
            jnp.where(known & ~prompt, history, NO_TOKEN)
        )
        return in_prompt, counts

    def skip() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((rows, vocab_size), bool), jnp.zeros((rows, vocab_size), jnp.int32)

    in_prompt, counts = lax.cond(_penalised(arrays).any(), count, skip)
    return Context(history, prompt_length, length, in_prompt, counts)


def advance(context: Context, token: jax.Array, active: jax.Array) -> Context:
    """Appends one emitted token to the rows that are active.

    Args:
      context: the context before.
      token: `[B]` int32 in `[0, V)`.
      active: `[B]` bool; other rows stay as they are.
    """
    slot = lax.broadcasted_iota(jnp.int32, context.history.shape, 1)
    here = (slot == context.length[:, None]) & active[:, None]
    step = active.astype(jnp.int32)
    return dataclasses.replace(
        context,
        history=jnp.where(here, token[:, None], context.history),
        length=context.length + step,
        counts=jax.vmap(lambda row, index, one: row.at[index].add(one, mode="drop"))(context.counts, token, step),
    )


def _bias(arrays: SamplingArrays, logits: jax.Array) -> jax.Array:
    return jax.vmap(lambda row, ids, values: row.at[ids].add(values, mode="drop"))(
        logits, arrays.bias_tokens, arrays.bias_values
    )


def _penalties(arrays: SamplingArrays, context: Context, logits: jax.Array) -> jax.Array:
    repetition = arrays.repetition_penalty[:, None]
    emitted = context.counts > 0
    scaled = jnp.where(logits < 0, logits * repetition, logits / repetition)
    logits = jnp.where(context.in_prompt | emitted, scaled, logits)
    logits = logits - arrays.frequency_penalty[:, None] * context.counts.astype(jnp.float32)
    return logits - jnp.where(emitted, arrays.presence_penalty[:, None], 0)


def _ban(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Sets `[B, n]` tokens to -inf; `NO_TOKEN` is ignored."""
    return jax.vmap(lambda row, ids: row.at[ids].set(-jnp.inf, mode="drop"))(logits, tokens)


def _no_repeat(arrays: SamplingArrays, context: Context, logits: jax.Array) -> jax.Array:
    """Bans every token that followed an earlier occurrence of the newest `n - 1` tokens."""
    history, length, n = context.history, context.length[:, None], arrays.no_repeat_ngram[:, None]
    slot = lax.broadcasted_iota(jnp.int32, history.shape, 1)

    def compare(back: jax.Array, follows: jax.Array) -> jax.Array:
        # Whether the token `back` places before each slot is the token `back` places before the next token.
        newest = jnp.take_along_axis(history, jnp.maximum(length - back, 0), axis=1)
        same = (jnp.roll(history, back, axis=1) == newest) & (slot >= back)
        return follows & (same | (back >= n))

    follows = lax.fori_loop(1, jnp.max(n), compare, (slot < length) & (n > 0) & (length >= n))
    return _ban(logits, jnp.where(follows & (history >= 0), history, NO_TOKEN))


def _sequences(arrays: SamplingArrays, context: Context, logits: jax.Array) -> jax.Array:
    width = arrays.sequences.shape[-1]
    back = width - 1 - jnp.arange(width - 1)
    at = context.length[:, None] - back
    tail = jnp.take_along_axis(context.history, jnp.maximum(at, 0), axis=1)[:, None]
    lengths = arrays.sequence_lengths[:, :, None]
    same = (tail == arrays.sequences[:, :, :-1]) & (at >= 0)[:, None]
    complete = (same | (back >= lengths)).all(-1) & (lengths[..., 0] > 0)
    return _ban(logits, jnp.where(complete, arrays.sequences[:, :, -1], NO_TOKEN))


def _minimum(arrays: SamplingArrays, context: Context, logits: jax.Array) -> jax.Array:
    early = context.position < arrays.min_new_tokens
    return _ban(logits, jnp.where(early[:, None], arrays.eos, NO_TOKEN))


def _force(arrays: SamplingArrays, context: Context, logits: jax.Array) -> jax.Array:
    here = (arrays.forced_indices == context.position[:, None]) & (arrays.forced_indices >= 0)
    token = jnp.min(jnp.where(here, arrays.forced_tokens, NO_TOKEN), axis=-1, keepdims=True)
    vocabulary = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where(token == NO_TOKEN, logits, jnp.where(vocabulary == token, 0.0, -jnp.inf))


def apply_processors(
    arrays: SamplingArrays,
    context: Context,
    logits: jax.Array,
    *,
    processors: Sequence[Processor] = (),
    constraint: Constraint | None = None,
) -> jax.Array:
    """Applies everything that comes before temperature. A batch without a processor pays for one test of a
    flag.

    Args:
      arrays: settings of `B` rows.
      context: their tokens so far.
      logits: `[B, V]` float32.
      processors: the user's own, static, applied in order to all rows.
      constraint: host callback, static.

    Returns:
      `[B, V]` float32, -inf for removed tokens.

    Raises:
      ValueError: a processor changed the shape (while tracing).
    """

    def when(needed: jax.Array, rule: Callable[..., jax.Array], *operands: jax.Array | Context) -> jax.Array:
        return lax.cond(needed.any(), lambda: rule(arrays, *operands), lambda: operands[-1])

    def before(logits: jax.Array) -> jax.Array:
        logits = when(arrays.bias_tokens != NO_TOKEN, _bias, logits)
        logits = when(_penalised(arrays), _penalties, context, logits)
        logits = when(arrays.no_repeat_ngram > 0, _no_repeat, context, logits)
        logits = when(arrays.sequence_lengths > 0, _sequences, context, logits)
        return when(context.position < arrays.min_new_tokens, _minimum, context, logits)

    logits = lax.cond(needs_history(arrays).any(), before, lambda logits: logits, logits)
    if constraint is not None:
        mask = constraint_mask(
            constraint,
            arrays.request,
            context.history,
            context.prompt_length,
            context.length,
            (logits.shape[0], logits.shape[1]),
        )
        logits = jnp.where(mask, logits, -jnp.inf)
    logits = when(arrays.forced_indices >= 0, _force, context, logits)
    for processor in processors:
        shape, logits = logits.shape, processor(context.history, context.length, logits)
        if logits.shape != shape:
            raise ValueError(f"processor {processor} returned shape {logits.shape}, it must return {shape}")
        logits = logits.astype(jnp.float32)
    return logits
