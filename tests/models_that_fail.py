"""Models that go wrong on purpose."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Breaks:
    """A model whose logits turn NaN at one position."""

    inner: object
    position: int
    vocab_size: int = 50
    max_length: int = 512

    def init_cache(self, batch, slots):
        return self.inner.init_cache(batch, slots)

    def forward(self, params, tokens, positions, mask, cache, start):
        logits, cache = self.inner.forward(params, tokens, positions, mask, cache, start)
        return jnp.where((positions == self.position)[..., None], jnp.nan, logits), cache
