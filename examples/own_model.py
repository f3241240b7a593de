"""Bring your own model: a small attention model in plain JAX, checked and decoded with drafts.

A model is any hashable object with `vocab_size`, `max_length`, `init_cache` and `forward`. What it has to get right:
write the new entries at `start`, attend where `mask` is True, take positions from `positions`. `check_model` says
whether it does.

    python examples/own_model.py
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxlookahead import check_model, generate


@dataclasses.dataclass(frozen=True)
class OwnModel:
    """One attention layer over token and position vectors."""

    vocab_size: int = 64
    size: int = 32
    max_length: int = 256

    def init_params(self, key: jax.Array) -> dict[str, jax.Array]:
        shapes = {
            "tokens": (self.vocab_size, self.size),
            "positions": (self.max_length, self.size),
            "qkv": (self.size, 3 * self.size),
        }
        keys = jax.random.split(key, len(shapes))
        return {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}

    def init_cache(self, batch: int, slots: int) -> dict[str, jax.Array]:
        return {name: jnp.zeros((batch, slots, self.size)) for name in ("k", "v")}

    def forward(self, params, tokens, positions, mask, cache, start):
        # Padding may lie past the last position, where an index would give NaN.
        positions = jnp.minimum(positions, self.max_length - 1)
        x = params["tokens"][tokens] + params["positions"][positions]
        q, k, v = jnp.split(x @ params["qkv"] / self.size**0.5, 3, axis=-1)
        cache = {
            name: jax.lax.dynamic_update_slice_in_dim(cache[name], new, start, axis=1)
            for name, new in (("k", k), ("v", v))
        }
        scores = jnp.einsum("bth,bsh->bts", q, cache["k"]) / self.size**0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
        x = x + jnp.einsum("bts,bsh->bth", weights, cache["v"])
        return x @ params["tokens"].T, cache


def main() -> None:
    model = OwnModel()
    params = model.init_params(jax.random.key(0))
    print(check_model(model, params))
    prompts = [[1, 2, 3, 4], [5, 6, 7]]
    plain = generate(model, params, prompts, max_new_tokens=64, drafter=None)
    drafted = generate(model, params, prompts, max_new_tokens=64)
    for one, other in zip(plain, drafted, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        print(other.tokens.tolist())
    print(f"the same tokens in {drafted.stats.steps} steps instead of {plain.stats.steps}")


if __name__ == "__main__":
    main()
