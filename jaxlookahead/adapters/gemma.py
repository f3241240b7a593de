"""Models of google-deepmind's `gemma` package as a `Model`, unmodified: text alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxlookahead.models.protocol import Cache, Params

_INDEX = "end_index"


@dataclasses.dataclass(frozen=True, eq=False)
class GemmaModel:
    """A `Model` that calls a transformer of the package. Equal to itself alone: make one and keep it.

    Attributes:
      module: the linen module.
      vocab_size: `V`.
      max_length: None; its rotary embedding has no limit.
    """

    module: Any
    vocab_size: int
    max_length: int | None = None

    def init_cache(self, batch: int, slots: int) -> Cache:
        """For each layer keys and values `[B, S, K, H]`, and the positions `[B, S]` that its windows go by."""
        c = self.module.config
        shape = (batch, slots, c.num_kv_heads, c.head_dim)
        return {
            f"layer_{i}": {
                "k": jnp.zeros(shape, self.module.dtype),
                "v": jnp.zeros(shape, self.module.dtype),
                "positions": jnp.zeros((batch, slots), jnp.int32),
            }
            for i in range(c.num_layers)
        }

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Cache,
        start: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """See `Model`."""
        index = jnp.full((tokens.shape[0],), start, jnp.int32)
        cache = {name: {**layer, _INDEX: index} for name, layer in cache.items()}
        out = self.module.apply(
            {"params": params},
            tokens,
            positions=positions,
            cache=cache,
            attention_mask=mask,
            return_last_only=False,
        )
        return out.logits, {name: {k: v for k, v in layer.items() if k != _INDEX} for name, layer in out.cache.items()}


def from_gemma(module: Any) -> GemmaModel:
    """Wraps a transformer of the package; its parameters are what `gm.ckpts.load_params` returns.

    Args:
      module: such as `gm.nn.Gemma3_270M()`.

    Raises:
      TypeError: not a transformer with the package's configuration and cache.
    """
    config: Any = getattr(module, "config", None)
    lacking = [name for name in ("num_embed", "num_layers", "num_kv_heads", "head_dim") if not hasattr(config, name)]
    if lacking or not hasattr(module, "dtype"):
        raise TypeError(
            f"{type(module).__name__} is not a transformer of the gemma package: its config lacks {', '.join(lacking)}"
            if lacking
            else f"{type(module).__name__} is not a transformer of the gemma package: it has no dtype"
        )
    return GemmaModel(module, config.num_embed)
