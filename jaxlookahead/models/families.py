"""The model families of the built-in decoder: for each `model_type` its options, defaults and tensor names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxlookahead.models.rope import RopeConfig

Config = Mapping[str, Any]


def _llama(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}


def _windowed(config: Config) -> dict[str, Any]:
    return {"windows": windows(config, config.get("sliding_window"), lambda i: True)}


def _qwen2(config: Config) -> dict[str, Any]:
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    first = config.get("max_window_layers", 28)
    return {"qkv_bias": True, "windows": () if window is None else windows(config, window, lambda i: i >= first)}


def _qwen3(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return _qwen2(config) | {"qk_norm": True, "qkv_bias": bias, "out_bias": bias}


def _qwen3_moe(config: Config) -> dict[str, Any]:
    layers, step = range(config["num_hidden_layers"]), config.get("decoder_sparse_step", 1)
    skipped, experts = config.get("mlp_only_layers") or (), _experts(config)
    window = config.get("sliding_window") if config.get("use_sliding_window", False) else None
    return _qwen3(config) | {
        "windows": windows(config, window, lambda i: True),
        "num_experts": experts,
        "experts_per_token": config["num_experts_per_tok"],
        "expert_size": config["moe_intermediate_size"],
        "normalize_experts": bool(config.get("norm_topk_prob", False)),
        "dense_layers": tuple(i for i in layers if i in skipped or (i + 1) % step),
    }


def _mixtral(config: Config) -> dict[str, Any]:
    return _windowed(config) | {
        "num_experts": _experts(config),
        "experts_per_token": config["num_experts_per_tok"],
        "expert_size": config["intermediate_size"],
    }


def _experts(config: Config) -> int:
    # Newer configurations of every family call it as Mixtral does.
    return config["num_local_experts"] if "num_local_experts" in config else config["num_experts"]


def _gemma(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {
        "norm": "rms_offset",
        "embed_scale": config["hidden_size"] ** 0.5,
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _gemma2(config: Config) -> dict[str, Any]:
    return _gemma(config) | {
        "norm_order": "both",
        "attention_scale": config["query_pre_attn_scalar"] ** -0.5,
        "attention_cap": config.get("attn_logit_softcapping"),
        "logit_cap": config.get("final_logit_softcapping"),
        "windows": windows(config, config.get("sliding_window"), lambda i: i % 2 == 0),
    }


def _gemma3(config: Config) -> dict[str, Any]:
    pattern = config.get("_sliding_window_pattern", config.get("sliding_window_pattern", 6))
    ropes = config.get("rope_parameters") or {}
    local = ropes.get("sliding_attention") or {"rope_theta": config.get("rope_local_base_freq", 10000.0)}
    whole = ropes.get("full_attention") or {
        "rope_theta": config.get("rope_theta", 1000000.0),
        **(config.get("rope_scaling") or {}),
    }
    return _gemma2(config) | {
        "qk_norm": True,
        "windows": windows(config, config.get("sliding_window"), lambda i: (i + 1) % pattern != 0),
        "rope": RopeConfig.from_hf({"rope_parameters": whole}),
        "rope_local": RopeConfig.from_hf({"rope_parameters": local}),
    }


def _olmo2(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {
        "norm_order": "after",
        "qk_norm": True,
        "qk_norm_whole": True,
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _biased(bias: bool = True, attention: bool = True) -> dict[str, Any]:
    return {"norm": "layer", "gated": False, "qkv_bias": attention, "out_bias": attention, "mlp_bias": bias}


def _gpt2(config: Config) -> dict[str, Any]:
    return _biased() | {"rope": None, "learned_positions": config["max_position_embeddings"]}


def _gpt_neox(config: Config) -> dict[str, Any]:
    parallel = config.get("use_parallel_residual", True)
    return _biased(attention=bool(config.get("attention_bias", True))) | {
        "norm_order": "parallel" if parallel else "before"
    }


def _opt(config: Config) -> dict[str, Any]:
    before, bias = config.get("do_layer_norm_before", True), bool(config.get("enable_bias", True))
    return _biased(bias, bias) | {
        "rope": None,
        # The first two rows of the table stood for padding.
        "learned_positions": config["max_position_embeddings"] + 2,
        "position_offset": 2,
        "norm_order": "before" if before else "residual",
        "final_norm": before and not config.get("_remove_final_layer_norm", False),
        "embed_size": config.get("word_embed_proj_dim") or config["hidden_size"],
    }


def windows(config: Config, window: int | None, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer, from `layer_types` or else from `slides`; empty where no layer has one."""
    types = config.get("layer_types")
    if types is None:
        layers = range(config["num_hidden_layers"])
        types = ["sliding_attention" if window and slides(i) else "full_attention" for i in layers]
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer_types holds {', '.join(map(repr, unknown))}, which is not supported")
    if window is None and "sliding_attention" in types:
        raise ValueError("layer_types holds 'sliding_attention', but sliding_window is not set")
    found = tuple(window if t == "sliding_attention" else None for t in types)
    return found if any(w is not None for w in found) else ()


# Our name of a module to the checkpoint's. `layer` comes in front of the names of a layer's modules; a checkpoint may
# leave out `prefix`.
LLAMA_NAMES = {
    "prefix": "model.",
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layer": "model.layers.{}.",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "expert_gate": "mlp.experts.{}.gate_proj",
    "expert_up": "mlp.experts.{}.up_proj",
    "expert_down": "mlp.experts.{}.down_proj",
}
_AFTER = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_BOTH = _AFTER | {"mlp_norm": "pre_feedforward_layernorm"}
_MIXTRAL = {
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
}
_GPT2 = {
    "prefix": "transformer.",
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "layer": "transformer.h.{}.",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_GPT_NEOX = {
    "prefix": "gpt_neox.",
    "embed": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
    "layer": "gpt_neox.layers.{}.",
    "qkv": "attention.query_key_value",
    "out": "attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
_OPT = {
    "embed": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "norm": "model.decoder.final_layer_norm",
    "project_in": "model.decoder.project_in",
    "project_out": "model.decoder.project_out",
    "layer": "model.decoder.layers.{}.",
    "attention_norm": "self_attn_layer_norm",
    "mlp_norm": "final_layer_norm",
    "out": "self_attn.out_proj",
    "up": "fc1",
    "down": "fc2",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How checkpoints of one `model_type` are read.

    Attributes:
      options: from `config.json` to fields of `DecoderConfig`.
      defaults: what the reference implementation assumes where `config.json` is silent.
      names: of tensors, where they differ from `LLAMA_NAMES`.
      fields: names in `config.json`, where they differ from Llama's: Llama's name to this family's.
      only: fields that change what the model computes, with the values that are supported.
      by_head: whether a fused tensor holds each head's query, key and value together.
      transposed: whether projections in layers are stored `[in, out]`.
    """

    options: Callable[[Config], dict[str, Any]]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    by_head: bool = False
    transposed: bool = False

    def name(self, module: str) -> str:
        """The checkpoint's name of a module, empty where the family has none of that kind."""
        return self.names.get(module, LLAMA_NAMES.get(module, ""))


_CAUSAL = {"use_bidirectional_attention": (None, False)}
_GEMMA_DEFAULTS = {
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
}

FAMILIES: dict[str, Family] = {
    "llama": Family(options=_llama, defaults={"max_position_embeddings": 2048}),
    "mistral": Family(
        options=_windowed,
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(options=_qwen2, defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32}),
    "qwen3": Family(
        options=_qwen3, defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128}
    ),
    "qwen3_moe": Family(
        options=_qwen3_moe,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "sliding_window": 4096,
        },
    ),
    "mixtral": Family(
        options=_mixtral,
        names=_MIXTRAL,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
        },
    ),
    "phi3": Family(
        options=_windowed,
        names={"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    "olmo2": Family(options=_olmo2, names=_AFTER, defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}),
    "gemma": Family(options=_gemma, defaults=_GEMMA_DEFAULTS | {"num_key_value_heads": 16}, only=_CAUSAL),
    "gemma2": Family(
        options=_gemma2,
        names=_BOTH,
        fields={"hidden_act": "hidden_activation"},
        defaults=_GEMMA_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        only=_CAUSAL,
    ),
    "gemma3_text": Family(
        options=_gemma3,
        names=_BOTH,
        fields={"hidden_act": "hidden_activation"},
        defaults=_GEMMA_DEFAULTS
        | {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
        only=_CAUSAL,
    ),
    "gpt2": Family(
        options=_gpt2,
        names=_GPT2,
        fields={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        defaults={
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_new",
            "rms_norm_eps": 1e-5,
        },
        only={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        transposed=True,
    ),
    "gpt_neox": Family(
        options=_gpt_neox,
        names=_GPT_NEOX,
        fields={
            "rms_norm_eps": "layer_norm_eps",
            "partial_rotary_factor": "rotary_pct",
            "rope_theta": "rotary_emb_base",
        },
        defaults={
            "max_position_embeddings": 2048,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
        },
        by_head=True,
    ),
    "opt": Family(
        options=_opt,
        names=_OPT,
        fields={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        defaults={
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "hidden_act": "relu",
            "rms_norm_eps": 1e-5,
        },
        only={"layer_norm_elementwise_affine": (True,)},
    ),
}
