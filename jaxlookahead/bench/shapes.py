"""Shapes of published models, from their configurations; no weights."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, NamedSharding

    from jaxlookahead.models.protocol import Model, Params

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "gemma-3-4b": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
}


def abstract_model(name: str, *, dtype: str = "bfloat16", layers: int | None = None) -> tuple[Model, Params]:
    """A model of `CONFIGS`, and the shapes of its parameters in place of values.

    Args:
      name: key of `CONFIGS`.
      dtype: of the parameters and the cache.
      layers: only so many of the layers.
    """
    from flax import nnx

    from jaxlookahead.models.config import DecoderConfig
    from jaxlookahead.models.decoder import Decoder
    from jaxlookahead.models.flax_nnx import from_nnx

    if name not in CONFIGS:
        raise ValueError(f"no shapes of a model {name!r} are known; known: {', '.join(CONFIGS)}")
    config = dict(CONFIGS[name])
    if layers is not None:
        config["num_hidden_layers"] = layers
    decoder = dataclasses.replace(DecoderConfig.from_hf(config, dtype=dtype), block=0)
    return from_nnx(nnx.eval_shape(lambda: Decoder(decoder, rngs=nnx.Rngs(0))))


def tensor_parallel(params: Params, mesh: Mesh, axis: str) -> Any:
    """Shardings of the built-in decoder's plain parameters over one axis of a mesh.

    Products to more outputs (queries, keys and values; gate and up; logits) are divided by outputs, those back to the
    residual stream by inputs, as Shoeybi et al. 2019 (https://arxiv.org/abs/1909.08053) do. What the axis does not
    divide is replicated.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    size = mesh.shape[axis]

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        names = [key.key for key in path]
        spec: list[str | None] = [None] * len(leaf.shape)
        if names[-1] == "weight":
            divided = 1 if names[-2] in ("out", "down") else 0
            if leaf.shape[divided] % size == 0:
                spec[divided] = axis
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(place, params)
