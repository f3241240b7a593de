"""The whole of decoding as one traceable function: no host in the loop, for use inside a jitted training step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxlookahead.accept import NO_TOKEN, Progress, StopRules
from jaxlookahead.drafters.snapshot import TrieSnapshot
from jaxlookahead.models.protocol import Model, Params
from jaxlookahead.sampling.arrays import SamplingArrays
from jaxlookahead.sampling.rule import sampling_rule
from jaxlookahead.step import greedy_rule, prefill, verify
from jaxlookahead.struct import struct
from jaxlookahead.tree import NO_PARENT, ROOT, DraftTree


@struct
class OnDeviceGeneration:
    """What `generate` returns. `M` is `max_new_tokens`; entries past `counts` are `NO_TOKEN`, False and 0."""

    tokens: jax.Array  # [B, M] int32 responses
    from_draft: jax.Array  # [B, M] bool
    margins: jax.Array  # [B, M] float32
    scores: Any  # dict of [B, M] float32 log-probabilities, or None without `settings`
    counts: jax.Array  # [B] int32
    finish: jax.Array  # [B] int32, see `accept`: RUNNING never, EOS, STOP, LENGTH or BAD_LOGITS
    steps: jax.Array  # [] int32 model calls after prefill


def lookup(
    history: jax.Array,
    lengths: jax.Array,
    *,
    width: int,
    max_ngram: int = 3,
    trie: TrieSnapshot | None = None,
) -> DraftTree:
    """Prompt lookup in jnp: a chain copied from behind the latest earlier occurrence of the longest newest n-gram.

    Where the copy reaches the end of the row's text it goes on from its own beginning, which repeats a loop.

    Args:
      history: `[B, L]` int32, the row's text; what stands past `lengths` is of no account.
      lengths: `[B]` int32, at least 1. The newest token stands at `lengths - 1`.
      width: `N`, static.
      max_ngram: the longest n-gram that is searched for, static.
      trie: asked for contexts that the row's own text has only in shorter form; from `TrieDrafter.snapshot`.

    Returns:
      Trees `[B, N]` whose root is the newest token; nothing but the root where nothing was found.
    """
    batch, size = history.shape
    newest = jnp.take_along_axis(history, (lengths - 1)[:, None], axis=1)

    def suffix(k: int) -> jax.Array:
        """The token `k` before the newest one, `[B, 1]`."""
        token = jnp.take_along_axis(history, jnp.maximum(lengths - 1 - k, 0)[:, None], axis=1)
        return jnp.where((lengths > k)[:, None], token, NO_TOKEN - 1)

    def matched(text: jax.Array) -> jax.Array:
        """How many of the newest tokens, at most `max_ngram`, end at each place of `text` `[B, L]`."""
        count, still = jnp.zeros(text.shape, jnp.int32), jnp.ones(text.shape, bool)
        for k in range(max_ngram):
            shifted = jnp.pad(text, ((0, 0), (k, 0)), constant_values=NO_TOKEN)[:, : text.shape[1]]
            still = still & (shifted == suffix(k))
            count = count + still
        return count

    places = jnp.arange(size)
    own = jnp.where(places < (lengths - 1)[:, None], matched(history), 0)
    # The longest match, and the latest of several.
    best = jnp.argmax(own * size + places, axis=1)
    best_count = jnp.take_along_axis(own, best[:, None], axis=1)[:, 0]
    ahead = jnp.arange(width - 1)
    period = jnp.maximum(lengths - 1 - best, 1)
    source = best[:, None] + 1 + ahead % period[:, None]
    tokens = jnp.take_along_axis(history, jnp.minimum(source, size - 1), axis=1)
    valid = jnp.broadcast_to((best_count > 0)[:, None], tokens.shape)
    if trie is not None:
        node, depth = trie.match(history, lengths)
        copy = trie.follow(node, width - 1)
        deeper = (depth > best_count)[:, None]
        tokens = jnp.where(deeper, copy, tokens)
        valid = jnp.where(deeper, copy != NO_TOKEN, valid)
    chain = jnp.arange(width - 1, dtype=jnp.int32)
    parents = jnp.where(valid, chain, NO_PARENT)
    root = jnp.full((batch, 1), NO_PARENT, jnp.int32)
    return DraftTree(
        tokens=jnp.concatenate([newest, jnp.where(valid, tokens, 0)], axis=1).astype(jnp.int32),
        parents=jnp.concatenate([root, parents], axis=1),
    )


def generate(
    model: Model,
    params: Params,
    prompts: jax.Array,
    lengths: jax.Array,
    *,
    max_new_tokens: int,
    width: int = 8,
    max_ngram: int = 3,
    trie: TrieSnapshot | None = None,
    eos_ids: jax.Array | None = None,
    remaining: jax.Array | None = None,
    settings: SamplingArrays | None = None,
) -> OnDeviceGeneration:
    """Decodes a batch of prompts. Pure and traceable; the tokens are those of `jaxlookahead.generate`.

    Args:
      model: see `jaxlookahead.models.protocol.Model`; fixed under `jit`.
      params: its parameters.
      prompts: `[B, P]` int32, right padded.
      lengths: `[B]` int32, from 1 to `P`.

    Other Args:
      max_new_tokens: `M`, static. Prompts and responses must fit into `model.max_length`.
      width: tokens scored in a step for each row, static; 1 is plain decoding.
      max_ngram: see `lookup`; static.
      trie: see `lookup`.
      eos_ids: `[E]` int32 token ids that end a response.
      remaining: `[B]` int32, the most tokens for each row, at most `M`; 0 leaves a row out.
      settings: sampling settings from `sampling.pack`; greedy without.

    Raises:
      ValueError: prompts, responses and the model's length do not fit together.
    """
    batch, longest = prompts.shape
    if model.max_length is not None and longest + max_new_tokens > model.max_length:
        raise ValueError(
            f"prompts of {longest} tokens and max_new_tokens={max_new_tokens} pass the model's {model.max_length} "
            "positions; shorten one"
        )
    if width < 1 or max_ngram < 1:
        raise ValueError(f"width={width} and max_ngram={max_ngram} must be at least 1")
    trie = None if trie is None else trie.within(model.vocab_size)
    slots = longest + max_new_tokens + width
    with jax.named_scope("prefill"):
        _, cache = prefill(model, params, model.init_cache(batch, slots), prompts.astype(jnp.int32), jnp.int32(0))
    if remaining is None:
        remaining = jnp.full(batch, max_new_tokens, jnp.int32)
    eos = jnp.full((batch, 1), NO_TOKEN) if eos_ids is None else jnp.broadcast_to(eos_ids, (batch, len(eos_ids)))
    stops = StopRules(eos=eos.astype(jnp.int32), sequences=jnp.full((batch, 1, 1), NO_TOKEN, jnp.int32))
    history = jnp.zeros((batch, slots + 1), jnp.int32).at[:, :longest].set(prompts)
    prompt_lengths = lengths.astype(jnp.int32)

    def rule(history: jax.Array, held: jax.Array) -> Any:
        return greedy_rule if settings is None else sampling_rule(settings, history, prompt_lengths, held + 1)

    def step(state: Any) -> Any:
        cache, held, history, progress, out = state
        with jax.named_scope("draft"):
            tree = lookup(history, held + 1, width=width, max_ngram=max_ngram, trie=trie)
        done = verify(model, params, cache, held, tree, progress=progress, stops=stops, rule=rule(history, held))
        walk = done.walk
        emitted = held + 1 - prompt_lengths
        drafted = walk.nodes != ROOT

        def put(values: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
            return jax.vmap(lambda row, part, place: lax.dynamic_update_slice(row, part, (place,)))(values, new, at)

        out = OnDeviceGeneration(
            tokens=put(out.tokens, walk.tokens, emitted),
            from_draft=put(out.from_draft, drafted, emitted),
            margins=put(out.margins, walk.margins, emitted),
            scores=jax.tree.map(lambda values, new: put(values, new, emitted), out.scores, walk.scores),
            counts=out.counts + walk.counts,
            finish=jnp.maximum(out.finish, walk.finish),
            steps=out.steps + 1,
        )
        return done.cache, done.lengths, put(history, walk.tokens, held + 1), walk.progress, out

    def going(state: Any) -> jax.Array:
        return jnp.any(state[3].remaining > 0)

    # A step writes `width` entries from where the row ends, so the buffers have room for one more step.
    shape = (batch, max_new_tokens + width)
    scores = None
    if settings is not None:
        scores = {"logprob_raw": jnp.zeros(shape, jnp.float32), "logprob": jnp.zeros(shape, jnp.float32)}
    out = OnDeviceGeneration(
        tokens=jnp.full(shape, NO_TOKEN, jnp.int32),
        from_draft=jnp.zeros(shape, bool),
        margins=jnp.zeros(shape, jnp.float32),
        scores=scores,
        counts=jnp.zeros(batch, jnp.int32),
        finish=jnp.zeros(batch, jnp.int32),
        steps=jnp.int32(0),
    )
    progress = Progress(remaining=remaining.astype(jnp.int32), tail=jnp.full((batch, 1), NO_TOKEN, jnp.int32))
    held = prompt_lengths - 1
    *_, out = lax.while_loop(going, step, (cache, held, history, progress, out))
    return dataclasses.replace(
        out,
        **{
            name: jax.tree.map(lambda x: x[:, :max_new_tokens], getattr(out, name))
            for name in ("tokens", "from_draft", "margins", "scores")
        },
    )
