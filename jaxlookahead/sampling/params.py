"""What a request asks of sampling, and the arrays that a compiled step reads it from."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

# No vocabulary reaches this id, so scatters in "drop" mode ignore it, where -1 would wrap around.
NO_TOKEN = np.iinfo(np.int32).max
_MIN_TEMPERATURE = 1e-4


class FrozenMapping(Mapping):
    """A mapping from int that can be hashed and can't be written into."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[int, Any]):
        self._items = {key: items[key] for key in sorted(items)}

    def __getitem__(self, key: int) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


_EMPTY = FrozenMapping({})


def _reject(field: str, value: Any, remedy: str) -> ValueError:
    return ValueError(f"Sampling.{field} = {value!r}: {remedy}")


def _integer(field: str, value: Any, remedy: str, low: int = 0, high: int = 2**31 - 1) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise _reject(field, value, remedy) from None
    if not low <= number < high:
        raise _reject(field, value, remedy)
    return number


def _real(field: str, value: Any, remedy: str, low: float = -math.inf, high: float = math.inf) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _reject(field, value, remedy) from None
    if not (math.isfinite(number) and low <= number <= high):
        raise _reject(field, value, remedy)
    return number


def _tokens(field: str, value: Any) -> tuple[int, ...]:
    remedy = "pass token ids, integers from 0 upwards"
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise _reject(field, value, remedy)
    return tuple(_integer(field, token, remedy) for token in value)


def _token_mapping(field: str, value: Any, remedy: str) -> Mapping:
    if not isinstance(value, Mapping):
        raise _reject(field, value, remedy)
    return value


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one request chooses its tokens. Immutable, hashable; every field may differ between rows.

    The processors run in this order, the one of `transformers`' `generate`: logit bias, repetition penalty,
    frequency and presence penalty, no-repeat n-grams, banned tokens and sequences, minimum length, host
    constraint, forced tokens, the user's own processors, and, where temperature isn't 0, temperature, top-k,
    top-p, min-p.

    Attributes:
      temperature: divides the logits; 0 takes the most probable token and ignores top-k, top-p and min-p.
      top_k: keeps tokens at least as probable as the k-th; 0 keeps all. All tokens that tie with the k-th are
        kept.
      top_p: keeps the most probable tokens whose mass reaches `top_p`; 1 keeps all. Tokens of equal
        probability are kept or removed together.
      min_p: removes tokens less probable than `min_p` times the most probable one; 0 keeps all.
      repetition_penalty: divides positive and multiplies negative logits of every token in prompt or output
        (Keskar et al. 2019); 1 is off.
      presence_penalty: subtracted from the logit of every token in the output; 0 is off.
      frequency_penalty: subtracted from a token's logit once for each time it is in the output; 0 is off.
      logit_bias: token id -> number added to its logit; -inf bans it.
      banned_tokens: token ids never emitted. EOS may be among them.
      banned_sequences: runs of tokens never completed, matched over prompt and output.
      no_repeat_ngram: no n-gram of this length occurs twice in prompt and output; 0 is off.
      min_new_tokens: EOS is banned until this many tokens were emitted.
      forced_tokens: output index -> token id that is emitted there, whatever the bans say.
      seed: of the noise, below 2^64.
      num_samples: outputs per prompt. Each is a request of its own with its own request id, so their noise
        differs.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = _EMPTY
    banned_tokens: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram: int = 0
    min_new_tokens: int = 0
    forced_tokens: Mapping[int, int] = _EMPTY
    seed: int = 0
    num_samples: int = 1

    def __post_init__(self) -> None:
        remedy = f"use 0 for greedy decoding, or a number of at least {_MIN_TEMPERATURE}"
        temperature = _real("temperature", self.temperature, remedy, 0.0)
        if 0 < temperature < _MIN_TEMPERATURE:
            raise _reject("temperature", self.temperature, remedy)
        bias_remedy = "map token ids to finite numbers, or to -inf to ban a token"
        bias = {}
        for token, value in _token_mapping("logit_bias", self.logit_bias, bias_remedy).items():
            banned = isinstance(value, float | np.floating) and value == -math.inf
            bias[_integer("logit_bias", token, bias_remedy)] = (
                -math.inf if banned else _real("logit_bias", value, bias_remedy)
            )
        forced_remedy = "map output indices (0 is the first new token) to token ids"
        forced = {
            _integer("forced_tokens", index, forced_remedy): _integer("forced_tokens", token, forced_remedy)
            for index, token in _token_mapping("forced_tokens", self.forced_tokens, forced_remedy).items()
        }
        sequences = []
        for sequence in self.banned_sequences:
            sequences.append(_tokens("banned_sequences", sequence))
            if not sequences[-1]:
                raise _reject("banned_sequences", self.banned_sequences, "every sequence needs a token")
        penalty_remedy = "use a positive number; 1 turns it off"
        if not _real("repetition_penalty", self.repetition_penalty, penalty_remedy, 0.0) > 0:
            raise _reject("repetition_penalty", self.repetition_penalty, penalty_remedy)
        finite = "use a finite number; 0 turns it off"
        values = {
            "temperature": temperature,
            "top_k": _integer("top_k", self.top_k, "use a count of tokens; 0 keeps all"),
            "top_p": _real("top_p", self.top_p, "use a probability in [0, 1]; 1 keeps all", 0.0, 1.0),
            "min_p": _real("min_p", self.min_p, "use a ratio in [0, 1]; 0 keeps all", 0.0, 1.0),
            "repetition_penalty": float(self.repetition_penalty),
            "presence_penalty": _real("presence_penalty", self.presence_penalty, finite),
            "frequency_penalty": _real("frequency_penalty", self.frequency_penalty, finite),
            "logit_bias": FrozenMapping(bias),
            "banned_tokens": _tokens("banned_tokens", self.banned_tokens),
            "banned_sequences": tuple(sequences),
            "no_repeat_ngram": _integer("no_repeat_ngram", self.no_repeat_ngram, "use a length; 0 is off"),
            "min_new_tokens": _integer("min_new_tokens", self.min_new_tokens, "use a count; 0 turns it off"),
            "forced_tokens": FrozenMapping(forced),
            "seed": _integer("seed", self.seed, "use an integer in [0, 2^64)", 0, 2**64),
            "num_samples": _integer("num_samples", self.num_samples, "use a count of at least 1", 1),
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)

    def token_ids(self) -> dict[str, list[int]]:
        """Lists the token ids that each field names."""
        return {
            "logit_bias": list(self.logit_bias),
            "banned_tokens": list(self.banned_tokens),
            "banned_sequences": [token for sequence in self.banned_sequences for token in sequence],
            "forced_tokens": list(self.forced_tokens.values()),
        }


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
                raise _reject(field, max(tokens), f"token ids must be below the vocabulary size {vocab_size}")
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

    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([getattr(sampling, name) for sampling in samplings], dtype)

    seeds = np.array([sampling.seed for sampling in samplings], np.uint64)
    return SamplingArrays(
        request=np.array(requests, np.int32),
        seed=np.stack([seeds & np.uint64(2**32 - 1), seeds >> np.uint64(32)], axis=-1).astype(np.uint32),
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p_tail=(1 - column("top_p", np.float64)).astype(np.float32),
        min_p=column("min_p", np.float32),
        repetition_penalty=column("repetition_penalty", np.float32),
        presence_penalty=column("presence_penalty", np.float32),
        frequency_penalty=column("frequency_penalty", np.float32),
        bias_tokens=bias_tokens,
        bias_values=bias_values,
        sequences=sequences,
        sequence_lengths=sequence_lengths,
        no_repeat_ngram=column("no_repeat_ngram", np.int32),
        min_new_tokens=column("min_new_tokens", np.int32),
        eos=eos,
        forced_indices=forced_indices,
        forced_tokens=forced_tokens,
        vocab_size=vocab_size,
    )
