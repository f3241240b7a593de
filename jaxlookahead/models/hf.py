"""Hugging Face configurations and tensor names, translated to the built-in decoder's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxlookahead.models.config import ACTIVATIONS, DecoderConfig
from jaxlookahead.models.rope import RopeConfig

Path = tuple[str, ...]


def _llama(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def _mistral(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"windows": _windows(config, config.get("sliding_window"), first=0)}


def _qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "windows": _qwen_windows(config)}


def _qwen3(config: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qk_norm": True, "qkv_bias": bias, "out_bias": bias, "windows": _qwen_windows(config)}


FAMILIES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}

# What the library of the reference implementation assumes where config.json is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}


def decoder_config(config: Mapping[str, Any], *, dtype: str = "float32") -> DecoderConfig:
    """See `DecoderConfig.from_hf`."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ValueError(f"quantization_config (quant_method {method!r}) is not supported; use unquantized weights")
    config = _DEFAULTS[kind] | dict(config)
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    missing = [name for name in needed if config.get(name) is None]
    if missing:
        raise ValueError(f"the configuration of model_type {kind!r} lacks {', '.join(missing)}")
    heads = config["num_attention_heads"]
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate_size=config["intermediate_size"],
        max_length=config["max_position_embeddings"],
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=RopeConfig.from_hf(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=dtype,
        **FAMILIES[kind](config),
    )


def _windows(config: Mapping[str, Any], window: int | None, *, first: int) -> tuple[int | None, ...]:
    layers = config["num_hidden_layers"]
    types = config.get("layer_types")
    if types is None:
        types = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer_types holds {', '.join(map(repr, unknown))}, which is not supported")
    if window is None and "sliding_attention" in types:
        raise ValueError("layer_types holds 'sliding_attention', but sliding_window is not set")
    windows = tuple(window if t == "sliding_attention" else None for t in types)
    return windows if any(windows) else ()


def _qwen_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    if window is None:
        return ()
    return _windows(config, window, first=config.get("max_window_layers", 28))


@dataclasses.dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes.

    Attributes:
      path: of the parameter.
      shape: of the tensor, as the checkpoint holds it.
      rows: the parameter's outputs that the tensor fills, in the tensor's order; None: all.
      more_rows: whether the checkpoint may hold more rows (a padded vocabulary); they are cut off.
    """

    path: Path
    shape: tuple[int, ...]
    rows: tuple[range, ...] | None = None
    more_rows: bool = False


_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


def unused(config: DecoderConfig, name: str) -> bool:
    """Whether checkpoints may hold a tensor `name` that the model has no use for."""
    return bool(_IGNORED.fullmatch(name)) or (config.tied and name == "lm_head.weight")


def targets(config: DecoderConfig) -> dict[str, Target]:
    """Every tensor of a complete checkpoint, by name."""
    c = config
    vocabulary = (c.vocab_size, c.hidden_size)
    found = {"model.embed_tokens.weight": Target(("embed", "weight"), vocabulary, more_rows=True)}
    for i in range(c.num_layers):
        for name, where in _layer_targets(c).items():
            found[f"model.layers.{i}.{name}"] = dataclasses.replace(where, path=(f"layer_{i}", *where.path))
    found["model.norm.weight"] = Target(("norm", "scale"), (c.hidden_size,))
    if not c.tied:
        found["lm_head.weight"] = Target(("head", "weight"), vocabulary, more_rows=True)
    return found


def _layer_targets(c: DecoderConfig) -> dict[str, Target]:
    group, size, ffn = c.queries_per_kv, c.head_size, c.intermediate_size
    heads, kv_heads = c.num_heads * size, c.num_kv_heads * size

    def part(first: int, count: int) -> tuple[range, ...]:
        stride = (group + 2) * size
        return tuple(
            range(k * stride + first * size, k * stride + (first + count) * size) for k in range(c.num_kv_heads)
        )

    norms = {
        "input_layernorm": (("attention_norm",), c.hidden_size),
        "post_attention_layernorm": (("mlp_norm",), c.hidden_size),
    }
    if c.qk_norm:
        norms["self_attn.q_norm"] = (("attention", "q_norm"), size)
        norms["self_attn.k_norm"] = (("attention", "k_norm"), size)
    qkv, gate_up = ("attention", "qkv"), ("mlp", "gate_up")
    # The parameter, the outputs of it that the tensor fills, output and input size, whether there is a bias.
    products = {
        "self_attn.q_proj": (qkv, part(0, group), heads, c.hidden_size, c.qkv_bias),
        "self_attn.k_proj": (qkv, part(group, 1), kv_heads, c.hidden_size, c.qkv_bias),
        "self_attn.v_proj": (qkv, part(group + 1, 1), kv_heads, c.hidden_size, c.qkv_bias),
        "self_attn.o_proj": (("attention", "out"), None, c.hidden_size, heads, c.out_bias),
        "mlp.gate_proj": (gate_up, (range(ffn),), ffn, c.hidden_size, c.mlp_bias),
        "mlp.up_proj": (gate_up, (range(ffn, 2 * ffn),), ffn, c.hidden_size, c.mlp_bias),
        "mlp.down_proj": (("mlp", "down"), None, c.hidden_size, ffn, c.mlp_bias),
    }
    found = {f"{name}.weight": Target((*path, "scale"), (size,)) for name, (path, size) in norms.items()}
    for name, (path, rows, outputs, inputs, bias) in products.items():
        found[f"{name}.weight"] = Target((*path, "weight"), (outputs, inputs), rows)
        if bias:
            found[f"{name}.bias"] = Target((*path, "bias"), (outputs,), rows)
    return found


def fill(leaf: np.ndarray, where: Target, array: np.ndarray) -> None:
    """Writes one checkpoint tensor into its part of a parameter, cast to the parameter's dtype.

    Args:
      leaf: the parameter, `[out]`, `[out, in]` or, in blocks, `[out / block, in, block]`.
      where: the tensor's target.
      array: the tensor.
    """
    array = array[: where.shape[0]]
    done = 0
    for rows in where.rows or (range(len(array)),):
        piece = array[done : done + len(rows)]
        done += len(rows)
        if leaf.ndim < 3:
            leaf[rows.start : rows.stop] = piece
        else:
            row = np.arange(rows.start, rows.stop)
            leaf[row // leaf.shape[2], :, row % leaf.shape[2]] = piece
