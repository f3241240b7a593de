"""Makes small random checkpoints of further model families, and what the reference implementation computes.

For developers; the tests read its output. Made with torch 2.13 and transformers 5.24, in an environment of their own:

    python tests/golden/make_families.py [name ...]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
TOKENS = 24

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
NO_GROUPS = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
LOCAL_AND_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 4.0},
}

# Directory: class of the model, class of its configuration, options.
MODELS = {
    "phi3": ("Phi3", SIZES | {"sliding_window": 9, "partial_rotary_factor": 0.5, "tie_word_embeddings": False}),
    "gemma": ("Gemma", SIZES | {"head_dim": 12}),
    "gemma2": (
        "Gemma2",
        SIZES
        | {
            "head_dim": 12,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        SIZES
        | {
            "head_dim": 12,
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": LOCAL_AND_GLOBAL,
        },
    ),
    "olmo2": ("Olmo2", SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}),
    "qwen3_moe": (
        "Qwen3Moe",
        SIZES
        | {
            "head_dim": 12,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": False,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "gpt2": (
        "GPT2",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 64}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "gpt_neox": ("GPTNeoX", NO_GROUPS | {"rotary_pct": 0.5, "hidden_act": "gelu"}),
    "gpt_neox_sequential": ("GPTNeoX", NO_GROUPS | {"use_parallel_residual": False, "tie_word_embeddings": True}),
    "opt": (
        "OPT",
        NO_GROUPS | {"ffn_dim": 48, "pad_token_id": 0, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    ),
    "opt_after": (
        "OPT",
        NO_GROUPS
        | {"ffn_dim": 48, "pad_token_id": 0, "word_embed_proj_dim": 16, "max_position_embeddings": 64}
        | {"do_layer_norm_before": False},
    ),
    # With what every Gemma 3 has and GGUF files leave out: local base 10000, five local layers to a global one.
    "gemma3_gguf": (
        "Gemma3",
        SIZES
        | {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "num_hidden_layers": 6,
            "sliding_window": 7,
            "query_pre_attn_scalar": 12,
        },
    ),
}
MODEL_CLASSES = {"GPT2": "GPT2LMHeadModel"}
CONFIG_CLASSES = {"Gemma3": "Gemma3TextConfig"}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draws weights large enough that every part of the computation shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    offset = 0.0 if "gemma" in model.config.model_type else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                # GPT-2 alone keeps its weights as [in, out].
                transposed = model.config.model_type == "gpt2" and ".h." in name
                parameter.copy_(noise * 1.5 / parameter.shape[0 if transposed else -1] ** 0.5)
            else:
                scale = any(part in name for part in ("norm", "ln_")) and name.endswith("weight")
                parameter.copy_(offset + 0.3 * noise if scale else 0.3 * noise)


def make(name: str, seed: int) -> None:
    kind, options = MODELS[name]
    config_class = getattr(transformers, CONFIG_CLASSES.get(kind, f"{kind}Config"))
    config = config_class(**options, attn_implementation="eager")
    model = getattr(transformers, MODEL_CLASSES.get(kind, f"{kind}ForCausalLM"))(config).eval()
    randomize(model, seed)
    model.tie_weights()
    tokens = torch.randint(3, options["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        logits = model(tokens).logits[0].float().numpy()
    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory, max_shard_size="60KB" if name == "gemma2" else "1GB")
    np.savez_compressed(directory / "golden.npz", tokens=tokens[0].numpy().astype(np.int32), logits=logits)
    kept = json.loads((directory / "config.json").read_text())
    print(name, kept["model_type"], sum(file.stat().st_size for file in directory.iterdir()), "bytes", np.ptp(logits))


if __name__ == "__main__":
    for number, each in enumerate(MODELS):
        if not sys.argv[1:] or each in sys.argv[1:]:
            make(each, 100 + number)
