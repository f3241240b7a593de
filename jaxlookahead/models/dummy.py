"""A small random model for tests: quick to compile, deterministic, and lively enough to decode."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlookahead.models.config import DecoderConfig
from jaxlookahead.models.protocol import Model, Params

# Scales of norms: attention outweighs the token's own vector, and logits lie apart.
_GAINS = {"attention_norm": 3.0, "norm": 8.0}

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

    config = dataclasses.replace(TINY, **overrides)
    # Shapes first, numbers from numpy: drawing each weight with jax would compile a program for every shape.
    model, shapes = from_nnx(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name, values = path[-1].key, rng.standard_normal(leaf.shape)
        if name == "scale":
            values = np.full(leaf.shape, _GAINS.get(path[-2].key, 1.0))
        elif name == "bias":
            values = 0.3 * values
        else:
            values = values * leaf.shape[1] ** -0.5
        return jnp.asarray(values, leaf.dtype)

    return model, jax.tree_util.tree_map_with_path(draw, shapes)
