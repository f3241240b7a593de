"""A small linen module of the contract's signature."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxlookahead import check_model, generate
from jaxlookahead.adapters.linen import from_linen
from jaxlookahead.testing import AdversarialDrafter, ModelCheckError


class Attention(nn.Module):
    vocab_size: int = 50
    size: int = 16
    max_length: int = 256
    layers: Any = (1, 2)
    use_mask: bool = True

    def init_cache(self, batch: int, slots: int):
        return [{name: jnp.zeros((batch, slots, self.size)) for name in "kv"} for _ in self.layers]

    @nn.compact
    def __call__(self, tokens, positions, mask, cache, start):
        embed = nn.Embed(self.vocab_size, self.size, embedding_init=nn.initializers.normal(1.0))
        where = nn.Embed(self.max_length, self.size, embedding_init=nn.initializers.normal(1.0))
        x, written = embed(tokens) + where(jnp.minimum(positions, self.max_length - 1)), []
        for layer in cache:
            q, k, v = jnp.split(nn.Dense(3 * self.size)(x), 3, axis=-1)
            layer = {
                name: jax.lax.dynamic_update_slice_in_dim(layer[name], new, start, 1)
                for name, new in (("k", k), ("v", v))
            }
            scores = jnp.einsum("bth,bsh->bts", q, layer["k"])
            shown = mask if self.use_mask else jnp.arange(mask.shape[-1]) < start + tokens.shape[1]
            x = x + jnp.einsum("bts,bsh->bth", jax.nn.softmax(jnp.where(shown, scores, -1e30)), layer["v"])
            written.append(layer)
        return embed.attend(x), written


def build(**options):
    module = Attention(**options)
    mask = jnp.ones((1, 1, 4), bool)
    token = jnp.zeros((1, 1), jnp.int32)
    return module, module.init(jax.random.key(0), token, token, mask, module.init_cache(1, 4), jnp.int32(0))


def test_check_model_and_drafted_equals_plain():
    module, params = build()
    model = from_linen(module)
    check_model(model, params, slots=64)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    common = {"max_new_tokens": 16, "width": 4, "adapt": False}
    plain = generate(model, params, prompts, drafter=None, **common)
    drafted = generate(model, params, prompts, drafter=AdversarialDrafter("repeated", 50), **common)
    for one, other in zip(plain, drafted, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_module_that_ignores_the_mask_is_found():
    module, params = build(use_mask=False)
    with pytest.raises(ModelCheckError, match="mask ignored"):
        check_model(from_linen(module), params, slots=64)


def test_equal_modules_are_equal_models():
    assert from_linen(Attention()) == from_linen(Attention()) != from_linen(Attention(size=8))
    assert hash(from_linen(Attention())) == hash(from_linen(Attention()))


def test_what_a_module_lacks_is_named():
    with pytest.raises(TypeError, match="module Dense lacks vocab_size, max_length, init_cache"):
        from_linen(nn.Dense(3))
    # Linen freezes lists and dicts of its own accord, so this takes an array.
    with pytest.raises(TypeError, match="Attention can't be hashed"):
        from_linen(Attention(layers=np.arange(2)))
