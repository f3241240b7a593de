"""Hugging Face configurations, translated to the built-in decoder's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxlookahead.models.config import DecoderConfig
from jaxlookahead.models.families import FAMILIES
from jaxlookahead.models.rope import RopeConfig

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def decoder_config(config: Mapping[str, Any], *, dtype: str = "float32") -> DecoderConfig:
    """See `DecoderConfig.from_hf`."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ValueError(f"quantization_config (quant_method {method!r}) is not supported; use unquantized weights")
    family = FAMILIES[kind]
    renamed = {ours: config[theirs] for ours, theirs in family.fields.items() if config.get(theirs) is not None}
    config = {**family.defaults, **config, **renamed}
    for name, values in family.only.items():
        if config.get(name, values[0]) not in values:
            raise ValueError(f"{name}={config[name]!r} of model_type {kind!r} is not supported")
    activation = _activation(config, kind, family.fields.get("hidden_act", "hidden_act"))
    needed = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    if kind == "gpt2" and config.get("intermediate_size") is None and config.get("hidden_size") is not None:
        config["intermediate_size"] = 4 * config["hidden_size"]
    missing = [family.fields.get(name, name) for name in needed if config.get(name) is None]
    if missing:
        raise ValueError(f"the configuration of model_type {kind!r} lacks {', '.join(missing)}")
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    common = {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_size": size,
        "intermediate_size": config["intermediate_size"],
        "max_length": config["max_position_embeddings"],
        "family": kind,
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rotary_size": _rotary_size(config, size),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "activation": activation,
        "dtype": dtype,
    }
    options = family.options(config)
    if "rope" not in options:
        options["rope"] = RopeConfig.from_hf(config)
    return DecoderConfig(**(common | options))


def _activation(config: Mapping[str, Any], kind: str, field: str) -> str:
    name = config.get("hidden_act", "silu")
    if kind == "gemma" and name == "gelu":
        # Its first configurations say so where they mean the approximation.
        name = "gelu_pytorch_tanh"
    if name not in _ACTIVATIONS:
        raise ValueError(f"{field} {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _rotary_size(config: Mapping[str, Any], size: int) -> int | None:
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = nested.get("partial_rotary_factor") if isinstance(nested, Mapping) else None
    share = config.get("partial_rotary_factor") if share is None else share
    return None if share is None or share == 1 else int(size * share)
