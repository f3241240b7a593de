"""Flax linen modules as a `Model`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxlookahead.models.protocol import Cache, Params


@dataclasses.dataclass(frozen=True)
class LinenModel:
    """A `Model` that calls a linen module of the contract's signature without its `params`.

    Attributes:
      module: a linen module whose `__call__(tokens, positions, mask, cache, start)` and `init_cache(batch, slots)` are
        as the `Model` contract describes them. Two of them with equal fields share compiled steps.
      vocab_size: `V`.
      max_length: the most positions, or None.
    """

    module: Any
    vocab_size: int
    max_length: int | None

    def init_cache(self, batch: int, slots: int) -> Cache:
        """See `Model`."""
        return self.module.init_cache(batch, slots)

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Cache,
        start: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """See `Model`. `params` are what `module.init` returned: `{"params": ...}`."""
        return self.module.apply(params, tokens, positions, mask, cache, start)


def from_linen(module: Any) -> LinenModel:
    """Wraps a linen module; pass what its `init` returned as the parameters.

    Args:
      module: with `vocab_size`, `max_length`, `init_cache(batch, slots)`, and `__call__(tokens, positions, mask, cache,
        start)` as the `Model` contract describes them. `init_cache` must not need parameters.

    Raises:
      TypeError: the module lacks one of them, or can't be hashed.
    """
    lacking = [n for n in ("vocab_size", "max_length", "init_cache", "__call__", "apply") if not hasattr(module, n)]
    if lacking:
        raise TypeError(f"module {type(module).__name__} lacks {', '.join(lacking)}, which a Model needs")
    try:
        hash(module)
    except TypeError as error:
        raise TypeError(
            f"module {type(module).__name__} can't be hashed ({error}), so compiled steps can't be kept for it; make "
            "its fields hashable: tuples in place of lists, frozen dataclasses in place of dicts"
        ) from error
    return LinenModel(module, module.vocab_size, module.max_length)
