"""The contract between a model and the decoder."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax

Params = Any
Cache = Any


@runtime_checkable
class Model(Protocol):
    """A decoder-only language model, described by a hashable object; parameters are passed to every call.

    Two models that compare equal and hash equal share compiled steps, so a frozen dataclass of the configuration is
    a good implementation.

    Attributes:
      vocab_size: `V`, the number of logits. Token ids lie in `[0, V)`.
      max_length: the most positions the model can hold, or None where there is no limit.
    """

    @property
    def vocab_size(self) -> int:
        """`V`."""

    @property
    def max_length(self) -> int | None:
        """The most positions, or None."""

    def __hash__(self) -> int: ...

    def init_cache(self, batch: int, slots: int) -> Cache:
        """Allocates an empty cache: a pytree of arrays, each with one batch axis and one slot axis.

        Which axes those are is found by comparing the shapes for two batches and two numbers of slots, so every leaf
        may have its own layout. A leaf without a slot axis can't be rolled back and is refused.
        """

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Cache,
        start: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Scores `T` tokens a row and writes their `T` cache entries.

        Args:
          params: the parameters, any pytree.
          tokens: `[B, T]` int32 token ids.
          positions: `[B, T]` int32 absolute positions. They need not be consecutive or distinct.
          mask: `[B, T, S]` bool; token `t` of row `b` attends to cache slot `s` where `mask[b, t, s]`. The new
            tokens lie at slots `[start, start + T)`, and each of them attends at least to itself.
          cache: from `init_cache` with `S` slots. Slot `i` below `start` holds position `i`.
          start: `[]` int32, the slot of the first new token, the same for all rows.

        Returns:
          logits `[B, T, V]` (any float dtype) and the cache with slots `[start, start + T)` written.
        """


def check_contract(model: Any) -> None:
    """Refuses what can't be a `Model`, before an obscure error comes of it.

    Raises:
      TypeError: `model` is a class, or lacks a part of the contract.
    """
    if isinstance(model, type):
        raise TypeError(f"model is the class {model.__name__}: pass an instance of it")
    parts = ("vocab_size", "max_length", "init_cache", "forward")
    if missing := [name for name in parts if not hasattr(model, name)]:
        raise TypeError(f"model is a {type(model).__name__} without {', '.join(missing)}; see jaxlookahead.Model")
