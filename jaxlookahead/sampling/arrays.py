"""The arrays from which a compiled step reads what its rows ask of sampling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxlookahead.sampling.params import Sampling, reject

# No vocabulary reaches this id, so scatters in "drop" mode ignore it, where -1 would wrap around.
NO_TOKEN = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Room per row for settings of variable length. A step compiled for one `Sizes` serves all that fit."""

    bias: int = 8
    sequences: int = 4
    sequence_length: int = 8
    forced: int = 4
    eos: int = 4

    @classmethod
    def of(cls, samplings: Sequence[Sampling], eos_ids: Sequence[int] = ()) -> Sizes:
        """Returns the smallest powers of two, from the defaults upwards, that hold all of `samplings`."""
        longest = [len(sequence) for s in samplings for sequence in s.banned_sequences]
        return cls(
            bias=_room(cls.bias, [len(_bias_of(s)) for s in samplings]),
            sequences=_room(cls.sequences, [len(s.banned_sequences) for s in samplings]),
            sequence_length=_room(cls.sequence_length, longest),
            forced=_room(cls.forced, [len(s.forced_tokens) for s in samplings]),
            eos=_room(cls.eos, [len(eos_ids)]),
        )

    def union(self, other: Sizes) -> Sizes:
        """Returns sizes that hold what either holds."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Sizes(*(max(pair) for pair in pairs))


def _room(least: int, needs: list[int]) -> int:
    need = max([least, *needs])
    return 1 << (need - 1).bit_length()


def _bias_of(sampling: Sampling) -> dict[int, float]:
    """A ban is a bias of -inf: no later processor brings such a token back but the one that forces it."""
    singles = [sequence[0] for sequence in sampling.banned_sequences if len(sequence) == 1]
    return dict(sampling.logit_bias) | dict.fromkeys([*sampling.banned_tokens, *singles], -math.inf)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingArrays:
    """The settings of `B` rows as arrays, all traced, all with the batch axis first. Made by `pack`.

    Attributes:
      request: `[B]` int32 request id.
      seed: `[B, 2]` uint32, low and high word.
      temperature: `[B]` float32, 0 for greedy rows.
      top_k: `[B]` int32, 0 where off.
      top_p_tail: `[B]` float32, `1 - top_p`: the mass that may be cut off, 0 where off.
      min_p: `[B]` float32, 0 where off.
      repetition_penalty: `[B]` float32.
      presence_penalty: `[B]` float32.
      frequency_penalty: `[B]` float32.
      bias_tokens: `[B, n]` int32, `NO_TOKEN` where unused. Banned tokens are here, too.
      bias_values: `[B, n]` float32.
      sequences: `[B, n, w]` int32 banned sequences, aligned to the right.
      sequence_lengths: `[B, n]` int32, 0 where unused.
      no_repeat_ngram: `[B]` int32.
      min_new_tokens: `[B]` int32.
      eos: `[B, n]` int32, `NO_TOKEN` where unused.
      forced_indices: `[B, n]` int32, -1 where unused.
      forced_tokens: `[B, n]` int32.
      vocab_size: `V`, static.
    """

    request: jax.Array
    seed: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p_tail: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    bias_tokens: jax.Array
    bias_values: jax.Array
    sequences: jax.Array
    sequence_lengths: jax.Array
    no_repeat_ngram: jax.Array
    min_new_tokens: jax.Array
    eos: jax.Array
    forced_indices: jax.Array
    forced_tokens: jax.Array
    vocab_size: int = dataclasses.field(metadata={"static": True})


def pack(
    samplings: Sequence[Sampling],
    *,
    requests: Sequence[int],
    vocab_size: int,
    eos_ids: Sequence[int] = (),
    sizes: Sizes | None = None,
) -> SamplingArrays:
    """Turns settings into arrays.

    Args:
      samplings: one per row; a slot without a request takes `Sampling()`, which costs nothing.
      requests: one id per row, below 2^31. The noise depends on it: equal requests need equal ids, and the
        samples of one prompt need different ids. -1 for a slot without a request.
      vocab_size: `V`, the number of logits.
      eos_ids: the tokens that `min_new_tokens` keeps away.
      sizes: room for the settings of variable length; those of `samplings` by default. Pass the sizes of all
        requests to come, and no later row changes a shape.

    Returns:
      `SamplingArrays` of numpy arrays.

    Raises:
      ValueError: a token id isn't in the vocabulary, or `sizes` is too small.
    """
    if len(requests) != len(samplings):
        raise ValueError(f"requests: {len(requests)} ids for {len(samplings)} samplings, pass one id per row")
    for sampling in samplings:
        for field, tokens in sampling.token_ids().items():
            if any(token >= vocab_size for token in tokens):
                raise reject(field, max(tokens), f"token ids must be below the vocabulary size {vocab_size}")
    if any(not 0 <= token < vocab_size for token in eos_ids):
        raise ValueError(f"eos_ids = {eos_ids!r}: token ids must lie in [0, {vocab_size})")
    need = Sizes.of(samplings, eos_ids)
    sizes = need if sizes is None else sizes
    if sizes.union(need) != sizes:
        raise ValueError(f"sizes = {sizes} can't hold these settings, which need {need}")

    rows = len(samplings)
    bias_tokens = np.full((rows, sizes.bias), NO_TOKEN, np.int32)
    bias_values = np.zeros((rows, sizes.bias), np.float32)
    sequences = np.full((rows, sizes.sequences, sizes.sequence_length), NO_TOKEN, np.int32)
    sequence_lengths = np.zeros((rows, sizes.sequences), np.int32)
    forced_indices = np.full((rows, sizes.forced), -1, np.int32)
    forced_tokens = np.full((rows, sizes.forced), NO_TOKEN, np.int32)
    eos = np.full((rows, sizes.eos), NO_TOKEN, np.int32)
    eos[:, : len(eos_ids)] = list(eos_ids)
    for row, sampling in enumerate(samplings):
        bias = _bias_of(sampling)
        bias_tokens[row, : len(bias)] = list(bias)
        bias_values[row, : len(bias)] = list(bias.values())
        for i, sequence in enumerate(s for s in sampling.banned_sequences if len(s) > 1):
            sequences[row, i, -len(sequence) :] = sequence
            sequence_lengths[row, i] = len(sequence)
        forced = sampling.forced_tokens
        forced_indices[row, : len(forced)] = list(forced)
        forced_tokens[row, : len(forced)] = list(forced.values())

    # Steps take numpy arrays where they take jax ones.
    def host(array: np.ndarray) -> Any:
        return array

    def column(name: str, dtype: type) -> Any:
        return np.array([getattr(sampling, name) for sampling in samplings], dtype)

    seeds = np.array([sampling.seed for sampling in samplings], np.uint64)
    return SamplingArrays(
        request=host(np.array(requests, np.int32)),
        seed=host(np.stack([seeds & np.uint64(2**32 - 1), seeds >> np.uint64(32)], axis=-1).astype(np.uint32)),
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p_tail=host((1 - column("top_p", np.float64)).astype(np.float32)),
        min_p=column("min_p", np.float32),
        repetition_penalty=column("repetition_penalty", np.float32),
        presence_penalty=column("presence_penalty", np.float32),
        frequency_penalty=column("frequency_penalty", np.float32),
        bias_tokens=host(bias_tokens),
        bias_values=host(bias_values),
        sequences=host(sequences),
        sequence_lengths=host(sequence_lengths),
        no_repeat_ngram=column("no_repeat_ngram", np.int32),
        min_new_tokens=column("min_new_tokens", np.int32),
        eos=host(eos),
        forced_indices=host(forced_indices),
        forced_tokens=host(forced_tokens),
        vocab_size=vocab_size,
    )
