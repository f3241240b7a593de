"""Every family on its golden checkpoint: trees, commits, drafts, gradients; configurations that are refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlookahead import check_model, generate, load
from jaxlookahead.models.config import DecoderConfig
from jaxlookahead.models.families import FAMILIES
from jaxlookahead.sampling.params import Sampling
from jaxlookahead.testing import OracleDrafter

from .conftest import causal, dense, one_by_one

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = (
    "mistral",
    "qwen3",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3",
    "olmo2",
    "mixtral",
    "qwen3_moe",
    "gpt2",
    "gpt_neox",
    "gpt_neox_sequential",
    "opt",
    "opt_after",
)


@functools.cache
def loaded(name: str):
    return load(GOLDEN / name, dtype="float32", tokenizer=None)


def config_of(name: str) -> dict:
    return json.loads((GOLDEN / name / "config.json").read_text())


def test_every_family_has_a_golden_checkpoint():
    assert {config_of(path.parent.name)["model_type"] for path in GOLDEN.glob("*/config.json")} == set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_F2_check_model(name):
    model, params, _ = loaded(name)
    report = check_model(model, params, slots=64)
    assert max(report.tree, report.commit) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_drafted_equals_plain(name):
    """Ragged prompts, one decoded greedily and one sampled; drafts with right and wrong branches."""
    model, params, _ = loaded(name)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 60, n).tolist() for n in (3, 11)]
    common = {"max_new_tokens": 24, "width": 4, "adapt": False}
    common["sampling"] = [Sampling(), Sampling(temperature=1.0, seed=3)]
    plain = generate(model, params, prompts, drafter=None, **common)
    right = {tuple(prompt): out.tokens.tolist() for prompt, out in zip(prompts, plain, strict=True)}
    drafted = generate(model, params, prompts, drafter=OracleDrafter(right, model.vocab_size), **common)
    for one, other in zip(drafted, plain, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    assert drafted.stats.accepted > 10


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "gpt_neox", "opt_after"])
def test_at_once_equals_one_by_one(name):
    """One token alone takes another path through the experts than many."""
    model, params, _ = loaded(name)
    tokens = np.random.default_rng(2).integers(3, 60, (1, 14))
    at_once, _ = dense(model, params, tokens, slots=16)
    np.testing.assert_allclose(one_by_one(model, params, tokens, slots=16), at_once, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "mixtral", "gpt2", "gpt_neox", "opt_after"])
def test_gradient_reaches_every_parameter(name):
    model, params, _ = loaded(name)
    tokens = jnp.asarray(np.random.default_rng(3).integers(3, 60, (2, 16)))
    mask, positions = jnp.asarray(causal(2, 16, 16)), jnp.broadcast_to(jnp.arange(16), (2, 16))

    def loss(params):
        logits, _ = model.forward(params, tokens, positions, mask, model.init_cache(2, 16), jnp.int32(0))
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1))

    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params)):
        assert np.all(np.isfinite(gradient)) and np.any(gradient != 0), jax.tree_util.keystr(path)


def test_padding_past_a_table_of_positions_stays_finite():
    model, params, _ = loaded("gpt2")
    prompt = np.random.default_rng(4).integers(3, 60, 50).tolist()
    output = generate(model, params, [prompt], max_new_tokens=100)[0]
    assert len(output.tokens) == model.max_length - len(prompt) == 14


def test_tensors_without_prefix_and_with_buffers():
    from jaxlookahead.checkpoints.huggingface import tensors
    from jaxlookahead.models.weights import ParamsBuilder

    builder = ParamsBuilder(DecoderConfig.from_hf(config_of("gpt2")))
    for name, array in tensors(GOLDEN / "gpt2"):
        builder.add(name.removeprefix("transformer."), array)
    builder.add("h.0.attn.bias", np.ones((1, 1, 64, 64)))
    _, params = builder.finish()
    jax.tree.map(np.testing.assert_array_equal, params, loaded("gpt2").params)


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("gpt2", "model_type", "mamba", "model_type 'mamba' is not supported; supported: gemma, gemma2"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx=True of model_type 'gpt2'"),
        ("gpt2", "activation_function", "mish", "activation_function 'mish' is not supported"),
        ("gpt2", "n_layer", None, "lacks n_layer"),
        ("opt", "layer_norm_elementwise_affine", False, "layer_norm_elementwise_affine=False"),
        ("gemma3", "use_bidirectional_attention", True, "use_bidirectional_attention=True"),
        ("gemma3", "layer_types", ["chunked_attention"] * 3, "'chunked_attention', which is not supported"),
        ("gemma2", "sliding_window", 0, "windows must be positive"),
        ("mixtral", "num_experts_per_tok", 5, "experts_per_token=5 must be 1 to num_experts=4"),
        ("phi3", "rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4}, "'longrope' is not supported: its"),
        ("gpt_neox", "rope_parameters", {"partial_rotary_factor": 0.4}, "rotary_size must be even .* got 3"),
    ],
)
def test_what_is_not_supported_is_named(name, field, value, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_hf(config_of(name) | {field: value})


def test_configurations_of_older_releases():
    """What transformers 4 wrote where its successor nests the values."""
    config = config_of("gemma3")
    new = DecoderConfig.from_hf(config)
    for field in ("rope_parameters", "layer_types", "_sliding_window_pattern"):
        del config[field]
    config |= {"rope_theta": 100000.0, "rope_local_base_freq": 1000.0, "sliding_window_pattern": 3}
    config["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    assert DecoderConfig.from_hf(config) == new

    config = config_of("gpt_neox")
    new = DecoderConfig.from_hf(config)
    del config["rope_parameters"]
    assert DecoderConfig.from_hf(config | {"rotary_pct": 0.5, "rotary_emb_base": 10000}) == new
    assert DecoderConfig.from_hf(config).rotary_size == 2

    config = config_of("qwen3_moe")
    new = DecoderConfig.from_hf(config)
    config["num_experts"] = config.pop("num_local_experts")
    assert DecoderConfig.from_hf(config) == new
    sparse = DecoderConfig.from_hf(config | {"decoder_sparse_step": 2, "mlp_only_layers": []})
    assert sparse.dense_layers == (0, 2)

    assert DecoderConfig.from_hf(config_of("gemma") | {"hidden_act": "gelu"}).activation == "gelu_tanh"
