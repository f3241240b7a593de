"""Configurations and tensors of Hugging Face checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlookahead.models import layers
from jaxlookahead.models import targets as target_table
from jaxlookahead.models.config import DecoderConfig
from jaxlookahead.models.targets import targets
from jaxlookahead.models.weights import CPU_BLOCK, ParamsBuilder

from .conftest import dense

BASE = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def config_of(model_type: str, **more) -> dict:
    return BASE | {"model_type": model_type} | more


def tensors_of(config: DecoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(t.shape, np.float32) * 0.3 for name, t in targets(config).items()}


def build(config: DecoderConfig, tensors: dict[str, np.ndarray], **options):
    builder = ParamsBuilder(config, **options)
    for name, array in tensors.items():
        builder.add(name, array)
    return builder.finish()


def reference(c: DecoderConfig, w: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Logits `[T, V]` straight from the checkpoint's tensors, in float64."""
    w = {k: v.astype(np.float64) for k, v in w.items()}
    norm = lambda x, s: s * x / np.sqrt((x * x).mean(-1, keepdims=True) + c.norm_eps)  # noqa: E731
    apply = lambda x, n: x @ w[f"{n}.weight"].T + w.get(f"{n}.bias", 0)  # noqa: E731
    count, half = len(tokens), c.head_size // 2
    angles = np.arange(count)[:, None] * c.rope.theta ** (-np.arange(half) / half)

    def rotate(x):
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(c.num_layers):
        name = f"model.layers.{i}"
        y = norm(x, w[f"{name}.input_layernorm.weight"])
        q, k, v = (apply(y, f"{name}.self_attn.{p}_proj").reshape(count, -1, c.head_size) for p in "qkv")
        if c.qk_norm:
            q, k = norm(q, w[f"{name}.self_attn.q_norm.weight"]), norm(k, w[f"{name}.self_attn.k_norm.weight"])
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(a, c.queries_per_kv, axis=1) for a in (k, v))
        behind = np.arange(count)[:, None] - np.arange(count)
        seen = (behind >= 0) & (behind < (c.window(i) or count))
        scores = np.where(seen, np.einsum("thd,shd->hts", q, k) / np.sqrt(c.head_size), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)
        x = x + apply(mixed.reshape(count, -1), f"{name}.self_attn.o_proj")
        y = norm(x, w[f"{name}.post_attention_layernorm.weight"])
        gate = apply(y, f"{name}.mlp.gate_proj")
        x = x + apply(gate / (1 + np.exp(-gate)) * apply(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
    head = w["model.embed_tokens.weight" if c.tied else "lm_head.weight"]
    return norm(x, w["model.norm.weight"]) @ head.T


CHECKPOINTS = {
    "llama": config_of("llama", tie_word_embeddings=True),
    "llama_biases": config_of("llama", attention_bias=True, mlp_bias=True, head_dim=10),
    "mistral": config_of("mistral", sliding_window=3),
    "qwen2": config_of("qwen2", use_sliding_window=True, sliding_window=3, max_window_layers=1),
    "qwen3": config_of("qwen3", head_dim=12, num_key_value_heads=1),
}


@pytest.mark.parametrize("block", [None, 0, 8])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_the_definition(name, block, monkeypatch):
    for module in (target_table, layers):
        monkeypatch.setattr(module, "PROJECTION_BLOCKS", 3)
        monkeypatch.setattr(module, "VOCABULARY_BLOCKS", 5)
    config = DecoderConfig.from_hf(CHECKPOINTS[name])
    config = config if block is None else DecoderConfig(**{**vars(config), "block": block})
    tensors = tensors_of(config)
    model, params = build(config, dict(reversed(tensors.items())))
    tokens = np.random.default_rng(1).integers(0, 90, 9)
    found, _ = dense(model, params, tokens[None])
    np.testing.assert_allclose(found[0], reference(config, tensors, tokens), atol=1e-4)


def test_from_hf_fields():
    c = DecoderConfig.from_hf(config_of("qwen3", tie_word_embeddings=True, rms_norm_eps=1e-5), dtype="bfloat16")
    assert (c.head_size, c.queries_per_kv, c.norm_eps, c.tied, c.qk_norm) == (128, 2, 1e-5, True, True)
    assert (c.max_length, c.dtype, c.windows, c.qkv_bias) == (64, "bfloat16", (), False)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (config_of("mistral"), (4096, 4096)),
        (config_of("mistral", sliding_window=None), ()),
        (config_of("qwen2", sliding_window=8), ()),
        (config_of("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1), (None, 8)),
        (config_of("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2), ()),
        (
            config_of(
                "qwen3",
                use_sliding_window=True,
                sliding_window=8,
                layer_types=["sliding_attention", "full_attention"],
            ),
            (8, None),
        ),
        (config_of("llama", sliding_window=8), ()),
    ],
)
def test_windows(config, windows):
    assert DecoderConfig.from_hf(config).windows == windows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: gemma, gemma2"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config .*'awq'.* is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic' is not supported"),
        ({"intermediate_size": None}, "lacks intermediate_size"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"model_type": "mistral", "layer_types": ["chunked_attention"] * 2}, "'chunked_attention'"),
        (
            {"model_type": "mistral", "sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "sliding_window is not set",
        ),
    ],
)
def test_what_is_not_supported_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_hf(config_of("llama") | change)


def test_D16_padded_rows_are_left_out():
    config = DecoderConfig.from_hf(config_of("llama"))
    tensors = tensors_of(config)
    padded = dict(tensors)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded[name] = np.concatenate([tensors[name], np.full((6, 32), 9, np.float32)])
    model, params = build(config, padded)
    assert model.vocab_size == 90
    expected, found = build(config, tensors)[1], params
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_names_without_prefix_and_unused_tensors():
    config = DecoderConfig.from_hf(config_of("llama", tie_word_embeddings=True))
    tensors = {name.removeprefix("model."): array for name, array in tensors_of(config).items()}
    unused = {"lm_head.weight": np.zeros((1, 1)), "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4)}
    build(config, unused | tensors)


def test_bad_tensors_are_named():
    config = DecoderConfig.from_hf(config_of("llama"))
    tensors, builder = tensors_of(config), ParamsBuilder(config)
    with pytest.raises(ValueError, match=r"'model.layers.2.mlp.up_proj.weight', which the model has no place for"):
        builder.add("model.layers.2.mlp.up_proj.weight", np.zeros((48, 32)))
    with pytest.raises(ValueError, match=r"'self_attn.q_proj.bias'"):
        builder.add("self_attn.q_proj.bias", np.zeros(32))
    name = "model.layers.0.self_attn.k_proj.weight"
    for shape in ((32, 16), (16, 31), (17, 32)):
        with pytest.raises(ValueError, match=rf"k_proj.weight' has shape \({shape[0]}, .*asks for \(16, 32\)"):
            builder.add(name, np.zeros(shape))
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' has shape \(89, 32\)"):
        builder.add("model.embed_tokens.weight", np.zeros((89, 32)))
    builder.add(name, tensors[name])
    with pytest.raises(ValueError, match=r"k_proj.weight' twice"):
        builder.add(name, tensors[name])


def test_missing_tensors_are_all_named():
    config = DecoderConfig.from_hf(config_of("qwen2"))
    tensors = tensors_of(config)
    lost = ["model.layers.1.self_attn.v_proj.bias", "model.norm.weight"]
    with pytest.raises(ValueError, match=f"lacks 2 tensors: {', '.join(lost)}"):
        build(config, {name: array for name, array in tensors.items() if name not in lost})


def test_dtype_is_of_parameters_and_cache():
    config = DecoderConfig.from_hf(config_of("llama"))
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors_of(config).items()}
    model, params = build(config, tensors, dtype=jnp.bfloat16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, model.init_cache(1, 4)))} == {"bfloat16"}
    wide = build(config, tensors)[1]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(wide)} == {"float32"}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(np.float32)), wide, params)


def test_blocks_by_default_on_cpu_and_plain_under_a_sharding():
    config = DecoderConfig.from_hf(config_of("llama", intermediate_size=64))
    tensors = tensors_of(config)
    on_cpu = build(config, tensors)[1]["layer_0"]["mlp"]["gate_up"]
    place, asked = jax.sharding.SingleDeviceSharding(jax.devices()[0]), []
    plain = build(config, tensors, sharding=place)[1]["layer_0"]["mlp"]["gate_up"]
    assert on_cpu["part_0"].shape == (2, 32, CPU_BLOCK) and plain["weight"].shape == (128, 32)

    def by_path(path, shape):
        asked.append((path, shape))
        return place

    params = build(config, tensors, sharding=by_path)[1]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    assert dict(asked) == {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    assert len(asked) == len(leaves)


def test_a_parameter_leaves_the_host_with_its_last_tensor(monkeypatch):
    config, put = DecoderConfig.from_hf(config_of("llama", tie_word_embeddings=True)), []
    device_put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda leaf, place=None: put.append(leaf.size) or device_put(leaf, place))
    builder, added = ParamsBuilder(config), 0
    for name, array in tensors_of(config).items():
        builder.add(name, array)
        added += array.size
        # Only layer 0's or 1's query, key and value, or gate and up, may be waiting for one another.
        assert added - sum(put) <= 3 * 48 * 32
    builder.finish()
    assert sum(put) >= added
