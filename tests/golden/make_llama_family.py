"""Makes the small random checkpoints here, and what the reference implementation computes with them.

For developers; the tests read its output. It needs torch, transformers, safetensors and numpy, in an
environment of their own:

    python tests/golden/make_llama_family.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).parent
TOKENS = 40

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}

MODELS = {
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "llama_linear": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": LINEAR, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama_bfloat16": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": PLAIN, "tie_word_embeddings": True},
    ),
    "mistral": (
        MistralForCausalLM,
        MistralConfig,
        {"rope_parameters": PLAIN, "sliding_window": 8, "tie_word_embeddings": False},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"rope_parameters": PLAIN, "tie_word_embeddings": True}),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"rope_parameters": YARN, "tie_word_embeddings": False, "head_dim": 16, "num_hidden_layers": 3},
    ),
}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draws weights large enough that every part of the computation shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)


def older_style(config: dict) -> dict:
    """The same configuration as transformers 4 wrote it."""
    rope = dict(config.pop("rope_parameters"))
    dtype = config.pop("dtype")
    return {**config, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": dtype}


def make(name: str, seed: int) -> None:
    model_class, config_class, options = MODELS[name]
    config = config_class(**(SIZES | options), attn_implementation="eager")
    model = model_class(config).eval()
    randomize(model, seed)
    narrow = name.endswith("bfloat16")
    if narrow:
        # The goldens are float32 sums over weights that bfloat16 holds exactly.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
    tokens = torch.randint(0, SIZES["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        logits = model(tokens).logits[0].numpy()
    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    saved = model.to(torch.bfloat16) if narrow else model
    saved.save_pretrained(directory, max_shard_size="40KB" if name == "mistral" else "1GB")
    if name == "llama3":
        path = directory / "config.json"
        path.write_text(json.dumps(older_style(json.loads(path.read_text())), indent=2) + "\n")
    arrays = {"tokens": tokens[0].numpy().astype(np.int32), "logits": logits}
    if narrow:
        # What the reference loses by computing in bfloat16 is the yardstick for ours.
        read = model_class.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="eager")
        with torch.no_grad():
            arrays["bfloat16_logits"] = read(tokens).logits[0].float().numpy()
    np.savez_compressed(directory / "golden.npz", **arrays)


if __name__ == "__main__":
    for number, each in enumerate(MODELS):
        make(each, number)
        print(each, sum(file.stat().st_size for file in (HERE / each).iterdir()), "bytes")
