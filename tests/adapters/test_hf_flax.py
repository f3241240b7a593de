"""Unmodified Flax models of `transformers` 4; skipped where they aren't installed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlookahead import check_model, generate
from jaxlookahead.adapters.hf_flax import SUPPORTED, from_hf_flax
from jaxlookahead.sampling.params import Sampling
from jaxlookahead.testing import OracleDrafter

tf = pytest.importorskip("transformers")
if int(tf.__version__.split(".")[0]) > 4:
    pytest.skip("Flax models left transformers with version 5", allow_module_level=True)

LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
OPT = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
NEO = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 5}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "mistral": ("MistralForCausalLM", "MistralConfig", LLAMA | {"sliding_window": 6}),
    "gemma": (
        "GemmaForCausalLM",
        "GemmaConfig",
        LLAMA | {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        OPT | {"max_position_embeddings": 128, "word_embed_proj_dim": 32, "pad_token_id": 0},
    ),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", GPT | {"rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        NEO | {"max_position_embeddings": 128, "attention_types": [[["global", "local"], 1]]},
    ),
}


@functools.cache
def build(name: str):
    kind, config, options = MODELS[name]
    flax_model = getattr(tf, f"Flax{kind}")(getattr(tf, config)(**options))
    # Large enough that logits are lively.
    flax_model.params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, flax_model.params)
    return flax_model, *from_hf_flax(flax_model)


def test_every_type_is_tested():
    assert sorted(MODELS) == sorted(SUPPORTED)


@pytest.mark.parametrize("name", MODELS)
def test_check_model_and_own_logits(name):
    flax_model, model, params = build(name)
    report = check_model(model, params, slots=64)
    assert max(report.tree, report.commit) < 1e-4
    tokens = np.random.default_rng(0).integers(0, 64, (1, 20))
    mask, positions = jnp.tril(jnp.ones((1, 20, 20), bool)), jnp.arange(20)[None]
    found, _ = model.forward(params, jnp.asarray(tokens), positions, mask, model.init_cache(1, 20), jnp.int32(0))
    wanted = flax_model(tokens).logits
    assert np.ptp(wanted) > 1
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_ragged_batch_drafted_equals_plain(name):
    """One prompt is decoded greedily, the others are sampled; the longest runs to the model's last position."""
    _, model, params = build(name)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 60, n).tolist() for n in (3, 9, 17, 110)]
    common = {"max_new_tokens": 24, "width": 4, "adapt": False}
    common["sampling"] = [Sampling(), *(Sampling(temperature=1.0, seed=i) for i in range(3))]
    plain = generate(model, params, prompts, drafter=None, **common)
    right = {tuple(p): out.tokens.tolist() for p, out in zip(prompts, plain, strict=True)}
    drafted = generate(model, params, prompts, drafter=OracleDrafter(right, model.vocab_size), **common)
    for one, other in zip(drafted, plain, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    assert drafted.stats.accepted > 10 and len(plain[3].tokens) == 18


def test_other_types_are_refused():
    with pytest.raises(TypeError, match=r"Flax models of type 'bert' .* are not supported; supported: gemma, gpt2"):
        from_hf_flax(tf.FlaxBertModel(tf.BertConfig(**LLAMA | {"num_hidden_layers": 1})))
    with pytest.raises(TypeError, match="FlaxGPT2Model has no logits"):
        from_hf_flax(tf.FlaxGPT2Model(tf.GPT2Config(**GPT)))
