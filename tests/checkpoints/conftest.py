"""The checkpoints of `tests/golden`, and GGUF files made from them as llama.cpp's converter makes them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

GOLDEN = Path(__file__).parents[1] / "golden"

_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


_GEMMA3_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _gguf_name(name: str, arch: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{suffix}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    names = _GGUF_NAMES | (_GEMMA3_NAMES if arch == "gemma3" else {})
    return f"blk.{layer}.{names[part]}.{suffix}"


def _permute(array: np.ndarray, heads: int) -> np.ndarray:
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _rope_factors(config: dict) -> np.ndarray:
    rope = config.get("rope_parameters") or config["rope_scaling"]
    size = config["head_dim"]
    factors = []
    for i in range(0, size, 2):
        wavelength = 2 * np.pi * 10000.0 ** (i / size)
        original = rope["original_max_position_embeddings"]
        if wavelength < original / rope["high_freq_factor"]:
            factors.append(1.0)
        elif wavelength > original / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            span = rope["high_freq_factor"] - rope["low_freq_factor"]
            keep = (original / wavelength - rope["low_freq_factor"]) / span
            factors.append(1 / ((1 - keep) / rope["factor"] + keep))
    return np.array(factors, np.float32)


@pytest.fixture
def write_gguf(tmp_path):
    """A function that converts a golden directory; `change` may edit metadata and tensors before writing."""

    def write(name: str, change=None, kinds=None) -> Path:
        from jaxlookahead.checkpoints.huggingface import tensors

        config = json.loads((GOLDEN / name / "config.json").read_text())
        arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        rope = config.get("rope_parameters") or config["rope_scaling"]
        rope = rope.get("full_attention", rope)
        metadata = {
            f"{arch}.block_count": config["num_hidden_layers"],
            f"{arch}.context_length": config["max_position_embeddings"],
            f"{arch}.embedding_length": config["hidden_size"],
            f"{arch}.feed_forward_length": config["intermediate_size"],
            f"{arch}.attention.head_count": heads,
            f"{arch}.attention.head_count_kv": kv_heads,
            f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            f"{arch}.rope.freq_base": rope.get("rope_theta", 10000.0),
        }
        if config["model_type"] in ("qwen3", "gemma3_text"):
            metadata[f"{arch}.attention.key_length"] = config["head_dim"]
            metadata[f"{arch}.attention.value_length"] = config["head_dim"]
        else:
            metadata[f"{arch}.rope.dimension_count"] = config["hidden_size"] // heads
        if rope["rope_type"] in ("linear", "yarn"):
            metadata[f"{arch}.rope.scaling.type"] = rope["rope_type"]
            metadata[f"{arch}.rope.scaling.factor"] = rope["factor"]
        if rope["rope_type"] == "yarn":
            key = f"{arch}.rope.scaling.original_context_length"
            metadata[key] = rope["original_max_position_embeddings"]
        if config.get("sliding_window"):
            metadata[f"{arch}.attention.sliding_window"] = config["sliding_window"]
        arrays = {}
        for theirs, values in tensors(GOLDEN / name):
            values = values.astype(np.float32)
            if arch == "llama" and ("q_proj" in theirs or "k_proj" in theirs):
                values = _permute(values, heads if "q_proj" in theirs else kv_heads)
            if arch == "gemma3" and theirs.endswith("norm.weight"):
                values = values + 1
            arrays[_gguf_name(theirs, arch)] = values
        if rope["rope_type"] == "llama3":
            arrays["rope_freqs.weight"] = _rope_factors(config)
        if change is not None:
            change(metadata, arrays)
        path = tmp_path / f"{name}.gguf"
        writer = gguf.GGUFWriter(path, arch)
        for key, value in metadata.items():
            add_value(writer, key, value)
        for key, values in arrays.items():
            kind = (kinds or {}).get(key)
            if kind is None:
                writer.add_tensor(key, values)
            else:
                writer.add_tensor(key, gguf.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def add_value(writer: gguf.GGUFWriter, key: str, value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def golden():
    """The directory of golden checkpoints."""
    return GOLDEN
