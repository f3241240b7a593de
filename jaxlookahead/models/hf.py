"""Hugging Face configurations and tensor names, translated to the built-in decoder's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlookahead.models.config import ACTIVATIONS, DecoderConfig
from jaxlookahead.models.layers import PROJECTION_BLOCKS, VOCABULARY_BLOCKS, part_sizes
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
class Piece:
    """Rows of a checkpoint tensor that go to one parameter.

    Attributes:
      path: of the parameter.
      source: the tensor's first row.
      rows: how many.
      start: the parameter's first output, which the first row becomes.
    """

    path: Path
    source: int
    rows: int
    start: int = 0


@dataclasses.dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes.

    Attributes:
      shape: of the tensor, as the checkpoint holds it.
      pieces: that it falls into.
      more_rows: whether the checkpoint may hold more rows (a padded vocabulary); they are left out.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    more_rows: bool = False


_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


def unused(config: DecoderConfig, name: str) -> bool:
    """Whether checkpoints may hold a tensor `name` that the model has no use for."""
    return bool(_IGNORED.fullmatch(name)) or (config.tied and name == "lm_head.weight")


def targets(config: DecoderConfig) -> dict[str, Target]:
    """Every tensor of a complete checkpoint, by name."""
    c, block = config, config.block or 0
    found = {"model.embed_tokens.weight": _vocabulary(c, "embed", block if c.tied else 0)}
    for i in range(c.num_layers):
        for name, where in _layer_targets(c, f"layer_{i}").items():
            found[f"model.layers.{i}.{name}"] = where
    found["model.norm.weight"] = _whole((c.hidden_size,), ("norm", "scale"))
    if not c.tied:
        found["lm_head.weight"] = _vocabulary(c, "head", block)
    return found


def _whole(shape: tuple[int, ...], path: Path) -> Target:
    return Target(shape, (Piece(path, 0, shape[0]),))


def _vocabulary(c: DecoderConfig, name: str, block: int) -> Target:
    pieces = _in_parts((name,), Piece((), 0, c.vocab_size), part_sizes(c.vocab_size, block, VOCABULARY_BLOCKS), block)
    return Target((c.vocab_size, c.hidden_size), pieces, more_rows=True)


def _in_parts(module: Path, piece: Piece, sizes: list[int], block: int) -> tuple[Piece, ...]:
    """Cuts a piece of a weight at the borders of the weight's parts."""
    if not sizes:
        return (dataclasses.replace(piece, path=(*module, "weight")),)
    cut, border = [], 0
    for i, blocks in enumerate(sizes):
        first, last = max(piece.start, border), min(piece.start + piece.rows, border + blocks * block)
        if first < last:
            source = piece.source + first - piece.start
            cut.append(Piece((*module, f"part_{i}"), source, last - first, first - border))
        border += blocks * block
    return tuple(cut)


def _layer_targets(c: DecoderConfig, layer: str) -> dict[str, Target]:
    group, size, ffn = c.queries_per_kv, c.head_size, c.intermediate_size
    attention, mlp = (layer, "attention"), (layer, "mlp")
    found = {
        "input_layernorm.weight": _whole((c.hidden_size,), (layer, "attention_norm", "scale")),
        "post_attention_layernorm.weight": _whole((c.hidden_size,), (layer, "mlp_norm", "scale")),
    }
    if c.qk_norm:
        found["self_attn.q_norm.weight"] = _whole((size,), (*attention, "q_norm", "scale"))
        found["self_attn.k_norm.weight"] = _whole((size,), (*attention, "k_norm", "scale"))

    def product(name: str, module: Path, out: int, into: int, bias: bool, pieces: Sequence[Piece]) -> None:
        block = c.block if c.block and out % c.block == 0 else 0
        sizes, rows = part_sizes(out, block, PROJECTION_BLOCKS), sum(piece.rows for piece in pieces)
        cut = tuple(part for piece in pieces for part in _in_parts(module, piece, sizes, block))
        found[f"{name}.weight"] = Target((rows, into), cut)
        if bias:
            whole = tuple(dataclasses.replace(piece, path=(*module, "bias")) for piece in pieces)
            found[f"{name}.bias"] = Target((rows,), whole)

    fused = c.num_kv_heads * (group + 2) * size
    for name, first, count in (("q", 0, group), ("k", group, 1), ("v", group + 1, 1)):
        # The parameter holds for each kv head its queries, its key and its value.
        rows = count * size
        pieces = [Piece((), k * rows, rows, (k * (group + 2) + first) * size) for k in range(c.num_kv_heads)]
        product(f"self_attn.{name}_proj", (*attention, "qkv"), fused, c.hidden_size, c.qkv_bias, pieces)
    whole = [Piece((), 0, c.hidden_size)]
    product("self_attn.o_proj", (*attention, "out"), c.hidden_size, c.num_heads * size, c.out_bias, whole)
    product("mlp.gate_proj", (*mlp, "gate_up"), 2 * ffn, c.hidden_size, c.mlp_bias, [Piece((), 0, ffn)])
    product("mlp.up_proj", (*mlp, "gate_up"), 2 * ffn, c.hidden_size, c.mlp_bias, [Piece((), 0, ffn, ffn)])
    product("mlp.down_proj", (*mlp, "down"), c.hidden_size, ffn, c.mlp_bias, whole)
    return found


def fill(leaf: np.ndarray, piece: Piece, array: np.ndarray) -> None:
    """Writes a piece of a checkpoint tensor into a parameter, cast to the parameter's dtype.

    Args:
      leaf: the parameter, `[out]`, `[out, in]` or, in blocks, `[out / block, in, block]`.
      piece: which rows go where.
      array: the tensor.
    """
    rows = array[piece.source : piece.source + piece.rows]
    if leaf.ndim < 3:
        leaf[piece.start : piece.start + piece.rows] = rows
    else:
        row = np.arange(piece.start, piece.start + piece.rows)
        leaf[row // leaf.shape[2], :, row % leaf.shape[2]] = rows
