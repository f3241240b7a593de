"""A small random model for tests: quick to compile, deterministic, and lively enough to decode."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxlookahead.models.config import DecoderConfig
from jaxlookahead.models.protocol import Model, Params

_ATTENTION_GAIN = 3.0
_LOGIT_GAIN = 8.0

TINY = DecoderConfig(
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    intermediate_size=64,
    max_length=512,
)


def tiny_decoder(seed: int = 0, **overrides: Any) -> tuple[Model, Params]:
    """A random decoder of the Llama family with two layers of width 32 and 96 tokens.

    Norm scales are raised so that logits differ clearly and depend on the whole context: greedy decoding neither hits
    near ties often nor falls into one repeated token.

    Args:
      seed: of the weights.
      **overrides: fields of `DecoderConfig` in place of the small model's.

    Returns:
      the model and its parameters.

    Raises:
      TypeError: an unknown field.
    """
    from flax import nnx

    from jaxlookahead.models.decoder import Decoder
    from jaxlookahead.models.flax_nnx import from_nnx

    model, params = from_nnx(Decoder(dataclasses.replace(TINY, **overrides), rngs=nnx.Rngs(seed)))
    gains = {"attention_norm": _ATTENTION_GAIN, "norm": _LOGIT_GAIN}

    def scale(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return (leaf * gains.get(path[-2].key, 1)).astype(leaf.dtype) if path[-1].key == "scale" else leaf

    return model, jax.tree_util.tree_map_with_path(scale, params)
