"""GGUF files as Hugging Face checkpoints: configuration, tensor names, tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxlookahead.checkpoints.gguf_file import GGUFFile, check_formats

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")

_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
# Keys that change what a model computes, with the value that changes nothing.
_NEUTRAL = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.scale": 0,
    "attention.causal": True,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "use_parallel_residual": False,
    "embedding_scale": 0,
    "residual_scale": 0,
    "logit_scale": 0,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_log_multiplier": 0,
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
# What every Llama 3 checkpoint uses. The file holds the resulting factors alone.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The content that `config.json` has for the same model.

    Raises:
      ValueError: an architecture, a tensor or an option that is not supported, named.
    """
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: the architecture {arch!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )

    def option(key: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{arch}.{key}", default)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise ValueError(f"{file.path}: {arch}.{key} differs between layers, which is not supported")
            value = value[0].item()
        return value

    for key, neutral in _NEUTRAL.items():
        if option(key, neutral) != neutral:
            raise ValueError(f"{file.path}: {arch}.{key}={option(key)!r} is not supported")
    config: dict[str, Any] = {"model_type": arch, "hidden_act": "silu"}
    for name, key in _SIZES.items():
        config[name] = option(key)
        if not isinstance(config[name], (int, float)) or not config[name] > 0:
            raise ValueError(f"{file.path}: the metadata key {arch}.{key} is {config[name]!r}, not a positive number")
    config["num_key_value_heads"] = option("attention.head_count_kv") or config["num_attention_heads"]
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(
            f"{file.path} lacks the tensor 'token_embd.weight'; give the first of a split file's parts whole"
        )
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    rotated = option("rope.dimension_count")
    size = option("attention.key_length") or config["hidden_size"] // config["num_attention_heads"]
    if option("attention.value_length", size) != size or (rotated or size) != size:
        raise ValueError(
            f"{file.path}: heads with key_length {size}, value_length "
            f"{option('attention.value_length', size)} and "
            f"rope.dimension_count {rotated} are not supported; all must be equal"
        )
    config["head_dim"] = size
    if arch == "llama":
        config |= _llama_options(file, option("attention.sliding_window"))
    elif arch == "gemma3":
        config |= _gemma3_options(config, option("attention.sliding_window"))
    elif option("attention.sliding_window"):
        raise ValueError(f"{file.path}: {arch}.attention.sliding_window is not supported")
    config["rope_theta"] = float(option("rope.freq_base", 10000.0))
    config["rope_scaling"] = _rope_scaling(file, arch, option, config)
    return config


def _llama_options(file: GGUFFile, window: int | None) -> dict[str, Any]:
    biases = {
        k: f"blk.0.{v}.bias" in file.tensors for k, v in (("q", "attn_q"), ("o", "attn_output"), ("mlp", "ffn_up"))
    }
    if biases["q"] != biases["o"]:
        raise ValueError(
            f"{file.path}: biases on the query projection or the output projection alone are not supported for llama"
        )
    if window and any(biases.values()):
        raise ValueError(f"{file.path}: biases together with a sliding window are not supported for llama")
    if window:
        return {"model_type": "mistral", "sliding_window": window}
    return {"attention_bias": biases["q"], "mlp_bias": biases["mlp"]}


def _gemma3_options(config: dict[str, Any], window: int | None) -> dict[str, Any]:
    """What every Gemma 3 has and its files leave out."""
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    # The largest alone scales queries by the width of the stream over the heads.
    scalar = config["hidden_size"] // heads if layers == 62 else config["head_dim"]
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": window,
        "rope_local_base_freq": 10000.0,
        **({} if window else {"layer_types": ["full_attention"] * layers}),
    }


def _rope_scaling(file: GGUFFile, arch: str, option: Any, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = option("rope.scaling.type", "none")
    factor = option("rope.scaling.factor") or option("rope.scale_linear") or 1.0
    original = option("rope.scaling.original_context_length")
    if option("rope.scaling.type") is None and factor != 1.0:
        kind = "linear"
    factors = _ROPE_FACTORS in file.tensors
    if kind not in ("none", "linear", "yarn") or (factors and kind != "none" and factor != 1.0):
        raise ValueError(
            f"{file.path}: {arch}.rope.scaling.type "
            f"{kind!r}{' together with rope_freqs' if factors else ''} is not "
            "supported; supported: none, linear, yarn, and the rope_freqs of Llama 3"
        )
    if factors:
        return _llama3_scaling(file, config)
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original or config["max_position_embeddings"],
        "beta_fast": option("rope.scaling.yarn_beta_fast"),
        "beta_slow": option("rope.scaling.yarn_beta_slow"),
    }


def _llama3_scaling(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """The parameters that give the file's factors, plain over scaled frequency, `[H / 2]`."""
    from jaxlookahead.models.rope import RopeConfig, inverse_frequencies

    factors = file.read(_ROPE_FACTORS).reshape(-1)
    size, theta = config["head_dim"], config["rope_theta"]
    plain, _ = inverse_frequencies(RopeConfig(theta=theta), size)
    factor = float(factors.max())
    if factors.shape == plain.shape and factors.min() >= 1 and factor > 1:
        # The ramp between the frequencies kept and those divided by `factor` tells the original length.
        keep = (1 / factors - 1 / factor) / (1 - 1 / factor)
        low, high = _LLAMA3.values()
        lengths = 2 * np.pi / plain * (low + keep * (high - low))
        ramp = lengths[(keep > 1e-4) & (keep < 1 - 1e-4)]
        length = round(float(np.median(ramp))) if ramp.size else 8192
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            **_LLAMA3,
            "original_max_position_embeddings": length,
        }
        ours, _ = inverse_frequencies(RopeConfig.from_hf({"rope_theta": theta, "rope_scaling": scaling}), size)
        if np.allclose(plain / ours, factors, rtol=1e-4):
            return scaling
    raise ValueError(
        f"{file.path}: the tensor {_ROPE_FACTORS!r} is not a Llama 3 scaling (low and high frequency factors "
        "1 and 4), which alone is supported; use the safetensors checkpoint"
    )


def hf_name(name: str, arch: str = "llama") -> str | None:
    """The Hugging Face name of a tensor of an architecture, or None for those that are no parameters.

    Raises:
      ValueError: the name is unknown.
    """
    if name == _ROPE_FACTORS:
        return None
    found = _TENSOR.fullmatch(name)
    layer, part, suffix = found.groups() if found else (None, None, None)
    if layer is None and part in _OTHER_NAMES:
        return f"{_OTHER_NAMES[part]}.{suffix}"
    names = _LAYER_NAMES | (_GEMMA3_NAMES if arch == "gemma3" else {})
    if layer is not None and part in names:
        return f"model.layers.{layer}.{names[part]}.{suffix}"
    raise ValueError(f"the tensor {name!r} has no place in the architectures supported: {', '.join(ARCHITECTURES)}")


def tensors(file: GGUFFile, config: dict[str, Any], dtype: Any = np.float32) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every parameter under its Hugging Face name, dequantized to `dtype`, one at a time.

    Raises:
      ValueError: a tensor's name or format is not supported, before the first is read.
    """
    check_formats(file)
    arch = file.metadata["general.architecture"]
    names = {name: hf_name(name, arch) for name in file.tensors}
    for name, theirs in names.items():
        if theirs is None:
            continue
        if arch == "gemma3" and theirs.endswith("norm.weight"):
            # llama.cpp's converter has added the 1 that the model adds.
            yield theirs, file.read(name, np.float32) - 1
        else:
            yield theirs, file.read(name, dtype, order=_row_order(file, name, config))


def _row_order(file: GGUFFile, name: str, config: dict[str, Any]) -> np.ndarray | None:
    """Where the rows of a query or key projection go.

    llama.cpp rotates neighbouring pairs of dimensions for the architecture `llama` and so stores each head's
    rows as 0, H/2, 1, H/2 + 1, ...; the other architectures rotate halves and store rows as they are.
    """
    part = name.split(".")[-2] if name.startswith("blk.") else ""
    if file.metadata["general.architecture"] != "llama" or part not in ("attn_q", "attn_k"):
        return None
    heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    info = file.tensors[name]
    rows = info.shape[0]
    if rows % (2 * heads):
        raise ValueError(f"{file.path}: the tensor {name!r} of shape {info.shape} does not divide into {heads} heads")
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)
