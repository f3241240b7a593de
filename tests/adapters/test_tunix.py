"""Unmodified tunix models; skipped where the package isn't installed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("tunix.models.llama3.model", reason="google-tunix is not installed")

from tunix.generate import sampler as sampler_lib
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3

from jaxlookahead import check_model, generate
from jaxlookahead.adapters.tunix import from_tunix
from jaxlookahead.sampling.params import Sampling
from jaxlookahead.testing import OracleDrafter

CLASSES = {"Llama3": llama3, "Qwen2": qwen2, "Qwen3": qwen3}
SIZES = {
    "num_layers": 2,
    "vocab_size": 64,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "head_dim": 8,
    "num_kv_heads": 2,
    "rope_theta": 10000,
    "norm_eps": 1e-6,
}
PAD, BOS, EOS = 0, 1, 2


class Digits:
    """A tokenizer of tunix's kind for texts that are token ids with spaces between."""

    def encode(self, text: str, **_) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids, **_) -> str:
        return " ".join(str(int(i)) for i in ids)

    def bos_id(self) -> int:
        return BOS

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


def build(name: str, seed: int = 0, **overrides):
    """A model whose weights are large enough that its logits are lively."""
    home = CLASSES[name]
    module = getattr(home, name)(home.ModelConfig(**(SIZES | overrides)), rngs=nnx.Rngs(seed))
    nnx.update(module, jax.tree.map(lambda leaf: leaf * 3 if leaf.ndim > 1 else leaf, nnx.state(module)))
    return module


@pytest.mark.parametrize("name", CLASSES)
def test_check_model(name):
    model, params = from_tunix(build(name))
    report = check_model(model, params, slots=64)
    assert max(report.tree, report.commit) < 1e-4
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (1, 20)))
    mask, positions = jnp.tril(jnp.ones((1, 20, 20), bool)), jnp.arange(20)[None]
    wanted, _ = build(name)(tokens, positions, None, mask)
    found, _ = model.forward(params, tokens, positions, mask, model.init_cache(1, 20), jnp.int32(0))
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("name", CLASSES)
def test_ragged_batch_drafted_equals_plain_and_tunix_own_sampler(name):
    module = build(name)
    model, params = from_tunix(module)
    rng = np.random.default_rng(1)
    # tunix's sampler puts the BOS in front of each prompt itself.
    prompts = [[BOS, *rng.integers(3, 60, n).tolist()] for n in (3, 9, 17, 6)]
    common = {"max_new_tokens": 20, "eos_ids": [EOS]}
    plain = generate(model, params, prompts, drafter=None, **common)
    right = {tuple(p): out.tokens.tolist() for p, out in zip(prompts, plain, strict=True)}
    drafter = OracleDrafter(right, model.vocab_size)
    drafted = generate(model, params, prompts, drafter=drafter, width=4, adapt=False, **common)
    assert drafted.stats.accepted > 10

    sampler = sampler_lib.Sampler(
        module,
        Digits(),
        sampler_lib.CacheConfig(cache_size=64, num_layers=2, num_kv_heads=2, head_dim=8),
    )
    theirs = sampler([Digits().decode(prompt[1:]) for prompt in prompts], max_generation_steps=20, eos_tokens=[EOS])
    for one, other, tokens in zip(drafted, plain, theirs.tokens, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        # Their output leaves out the EOS.
        wanted = [token for token in other.tokens.tolist() if token != EOS]
        np.testing.assert_array_equal(np.asarray(tokens)[: len(wanted)], wanted)


def test_sampled_drafted_equals_plain():
    model, params = from_tunix(build("Qwen3"))
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4]]
    common = {"max_new_tokens": 20, "sampling": Sampling(temperature=1.0, seed=1)}
    plain = generate(model, params, prompts, drafter=None, **common)
    right = {tuple(p): out.tokens.tolist() for p, out in zip(prompts, plain, strict=True)}
    drafter = OracleDrafter(right, model.vocab_size)
    drafted = generate(model, params, prompts, drafter=drafter, width=4, adapt=False, **common)
    for one, other in zip(drafted, plain, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_updated_weights_give_an_equal_model():
    module = build("Llama3")
    before, _ = from_tunix(module)
    nnx.update(module, jax.tree.map(lambda leaf: leaf + 1, nnx.state(module)))
    after, params = from_tunix(module)
    assert before == after and hash(before) == hash(after)
    other, _ = from_tunix(build("Llama3", rope_theta=500))
    assert other != before
    np.testing.assert_array_equal(jax.tree.leaves(params)[0], jax.tree.leaves(nnx.to_pure_dict(nnx.state(module)))[0])


def test_bfloat16():
    model, params = from_tunix(build("Qwen2", dtype=jnp.bfloat16, param_dtype=jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(model.init_cache(1, 8))} == {jnp.dtype("bfloat16")}
    check_model(model, params, slots=64)


def test_flash_attention_is_refused():
    with pytest.raises(ValueError, match="use_flash_attention=True is not supported: it ignores the mask"):
        from_tunix(build("Qwen3", use_flash_attention=True))


def test_gemma3_is_refused_with_the_reason():
    config = dataclasses.replace(
        gemma3.ModelConfig.gemma3_270m(), num_layers=1, num_embed=64, embed_dim=16, hidden_dim=16
    )
    with pytest.raises(TypeError, match=r"Gemma3 are not supported \(its sliding windows go by cache slot"):
        from_tunix(gemma3.Gemma3(config, rngs=nnx.Rngs(0)))


def test_other_modules_are_refused():
    with pytest.raises(TypeError, match="Linear are not supported; supported: Llama3, Qwen2, Qwen3"):
        from_tunix(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
