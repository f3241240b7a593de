"""Models of `google-tunix` (Llama3, Qwen2, Qwen3) as a `Model`, unmodified."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlookahead.models.flax_nnx import NnxModel, from_nnx
from jaxlookahead.models.protocol import Cache, Params

SUPPORTED = {"tunix.models.llama3": "Llama3", "tunix.models.qwen2": "Qwen2", "tunix.models.qwen3": "Qwen3"}
_REFUSED = {
    "tunix.models.gemma3": "its sliding windows go by cache slot, where draft trees don't lie at their positions",
    "tunix.models.gemma4": "its sliding windows go by cache slot, where draft trees don't lie at their positions",
}
_INDEX = "end_index"


class _Contract(nnx.Module):
    """The contract's signature around a tunix model, whose cache holds one write index for all rows."""

    def __init__(self, module: Any):
        self.module = module
        self.max_length = None

    @property
    def vocab_size(self) -> int:
        return self.module.config.vocab_size

    def init_cache(self, batch: int, slots: int) -> Cache:
        c = self.module.config
        # The write must have the cache's dtype; models without `dtype` compute in that of their weights.
        dtype = getattr(c, "dtype", None) or self.module.layers[0].attn.k_proj.w.dtype
        shape = (batch, slots, c.num_kv_heads, c.head_dim)
        return {f"layer_{i}": {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)} for i in range(c.num_layers)}

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, mask: jax.Array, cache: Cache, start: jax.Array
    ) -> tuple[jax.Array, Cache]:
        index = jnp.full((tokens.shape[0],), start, jnp.int32)
        cache = {name: {**layer, _INDEX: index} for name, layer in cache.items()}
        logits, cache = self.module(tokens, positions, cache, mask)
        return logits, {name: {k: v for k, v in layer.items() if k != _INDEX} for name, layer in cache.items()}


def from_tunix(module: Any) -> tuple[NnxModel, Params]:
    """Splits a tunix model into a `Model` and its parameters.

    The model is equal for modules of the same configuration, so after an update of the weights call it again: nothing
    compiles anew.

    Args:
      module: a `Llama3`, `Qwen2` or `Qwen3` of tunix.

    Raises:
      TypeError: a model of another kind.
      ValueError: flash attention is on, which ignores the mask.
    """
    homes = [base.__module__.rpartition(".")[0] for base in type(module).__mro__]
    if not any(home in SUPPORTED for home in homes):
        reasons = [_REFUSED[home] for home in homes if home in _REFUSED]
        why = f" ({reasons[0]})" if reasons else ""
        raise TypeError(
            f"tunix models of type {type(module).__name__} are not supported{why}; supported: "
            f"{', '.join(SUPPORTED.values())}"
        )
    if getattr(module.config, "use_flash_attention", False):
        raise ValueError(
            "use_flash_attention=True is not supported: it ignores the mask for more than one token; build the model "
            "with dataclasses.replace(config, use_flash_attention=False)"
        )
    return from_nnx(_Contract(module))
