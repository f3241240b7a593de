"""What a request asks of sampling."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

_MIN_TEMPERATURE = 1e-4


class FrozenMapping(Mapping[int, Any]):
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


def reject(field: str, value: Any, remedy: str) -> ValueError:
    return ValueError(f"Sampling.{field} = {value!r}: {remedy}")


def _integer(field: str, value: Any, remedy: str, low: int = 0, high: int = 2**31 - 1) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise reject(field, value, remedy) from None
    if not low <= number < high:
        raise reject(field, value, remedy)
    return number


def _real(field: str, value: Any, remedy: str, low: float = -math.inf, high: float = math.inf) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise reject(field, value, remedy) from None
    if not (math.isfinite(number) and low <= number <= high):
        raise reject(field, value, remedy)
    return number


def _tokens(field: str, value: Any) -> tuple[int, ...]:
    remedy = "pass token ids, integers from 0 upwards"
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise reject(field, value, remedy)
    return tuple(_integer(field, token, remedy) for token in value)


def _token_mapping(field: str, value: Any, remedy: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise reject(field, value, remedy)
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
            raise reject("temperature", self.temperature, remedy)
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
        if isinstance(self.banned_sequences, str | bytes) or not isinstance(self.banned_sequences, Iterable):
            raise reject("banned_sequences", self.banned_sequences, "pass a list of sequences of token ids")
        for sequence in self.banned_sequences:
            sequences.append(_tokens("banned_sequences", sequence))
            if not sequences[-1]:
                raise reject("banned_sequences", self.banned_sequences, "every sequence needs a token")
        penalty_remedy = "use a positive number; 1 turns it off"
        if not _real("repetition_penalty", self.repetition_penalty, penalty_remedy, 0.0) > 0:
            raise reject("repetition_penalty", self.repetition_penalty, penalty_remedy)
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
