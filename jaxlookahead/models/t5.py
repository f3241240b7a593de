"""T5, an encoder-decoder (Raffel et al. 2020, https://arxiv.org/abs/1910.10683), as Flax nnx modules.

The decoder alone follows the `Model` contract. What it needs of the encoder, the keys and values of cross-attention, is
part of its parameters: `with_inputs` puts it there, one entry a row, before the rows are decoded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxlookahead.models.decoder import write
from jaxlookahead.models.layers import Embedding, Norm, Projection, activate
from jaxlookahead.models.protocol import Cache, Params

_ACTIVATIONS = {"relu": ("relu", False), "gated-gelu": ("gelu_tanh", True), "gelu": ("gelu", False)}
INPUT_SIZES = (16, 64, 256, 1024, 4096)


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
    """Shapes and options of a T5. Hashable; a change recompiles.

    Attributes:
      vocab_size: `V`.
      hidden_size: width of the residual stream, `E`.
      encoder_layers: blocks of the encoder.
      decoder_layers: blocks of the decoder.
      num_heads: `K`, the same for queries, keys and values.
      head_size: `H`.
      intermediate_size: width of the feed-forward, `F`.
      activation: of the feed-forward, as in `DecoderConfig`.
      gated: whether the feed-forward has a gate.
      buckets: rows of the table of relative positions.
      max_distance: distances from here on share a bucket.
      norm_eps: added to the mean square in norms.
      tied: whether the output projection is the token embedding.
      scaled: whether the decoder's output is divided by `E ** 0.5` before it.
      start_token: the id that a response starts behind.
      dtype: of the parameters and the cache.
    """

    vocab_size: int
    hidden_size: int
    encoder_layers: int
    decoder_layers: int
    num_heads: int
    head_size: int
    intermediate_size: int
    activation: str = "relu"
    gated: bool = False
    buckets: int = 32
    max_distance: int = 128
    norm_eps: float = 1e-6
    tied: bool = True
    scaled: bool = True
    start_token: int = 0
    dtype: str = "float32"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: str = "float32") -> T5Config:
        """Translates a Hugging Face `config.json`.

        Raises:
          ValueError: a model type or a field's value that is not supported, named.
        """
        if config.get("model_type") != "t5":
            raise ValueError(f"model_type {config.get('model_type')!r} is not t5")
        kind = config.get("feed_forward_proj", "relu")
        if kind not in _ACTIVATIONS:
            raise ValueError(f"feed_forward_proj {kind!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
        activation, gated = _ACTIVATIONS[kind]
        # Newer configurations say so apart; where the two are not tied, nothing is scaled.
        scaled = bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True)))
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["d_model"],
            encoder_layers=config["num_layers"],
            decoder_layers=config.get("num_decoder_layers") or config["num_layers"],
            num_heads=config["num_heads"],
            head_size=config["d_kv"],
            intermediate_size=config["d_ff"],
            activation=activation,
            gated=gated,
            buckets=config.get("relative_attention_num_buckets", 32),
            max_distance=config.get("relative_attention_max_distance", 128),
            norm_eps=float(config.get("layer_norm_epsilon", 1e-6)),
            tied=scaled,
            scaled=scaled,
            start_token=config.get("decoder_start_token_id") or 0,
            dtype=dtype,
        )


def bucket(behind: jax.Array, *, both_ways: bool, buckets: int, max_distance: int) -> jax.Array:
    """The row of the table for each distance; by the logarithm from half of the rows on.

    Args:
      behind: int32, the query's position minus the key's.
      both_ways: whether keys ahead have rows of their own (the encoder); otherwise they count as distance 0.
      buckets: rows of the table.
      max_distance: distances from here on share the last row.
    """
    if both_ways:
        rows = buckets // 2
        first = jnp.where(behind < 0, rows, 0)
        distance = jnp.abs(behind)
    else:
        rows, first = buckets, jnp.zeros_like(behind)
        distance = jnp.maximum(behind, 0)
    exact = rows // 2
    far = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / math.log(max_distance / exact)
    far = exact + (far * (rows - exact)).astype(jnp.int32)
    return first + jnp.where(distance < exact, distance, jnp.minimum(far, rows - 1))


class Attention(nnx.Module):
    """Attention without a scale on its scores; projections have no biases."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        c = self.config = config
        inner = c.num_heads * c.head_size
        common: dict[str, Any] = {"bias": False, "block": 0, "dtype": c.dtype, "rngs": rngs}
        self.q, self.k, self.v = (Projection(inner, c.hidden_size, **common) for _ in range(3))
        self.o = Projection(c.hidden_size, inner, **common)

    def heads(self, x: jax.Array) -> jax.Array:
        """`[B, T, K * H]` to `[B, K, T, H]`."""
        c = self.config
        return jnp.swapaxes(x.reshape(*x.shape[:2], c.num_heads, c.head_size), 1, 2)

    def keys_values(self, x: jax.Array) -> dict[str, jax.Array]:
        """Of `[B, S, E]`: `k` and `v`, `[B, K, S, H]`."""
        return {"k": self.heads(self.k(x)), "v": self.heads(self.v(x))}

    def __call__(self, x: jax.Array, held: dict[str, jax.Array], bias: jax.Array) -> jax.Array:
        """Attends from `[B, T, E]` to keys and values `[B, K, S, H]`; `bias` is added to scores `[B, K, T, S]`."""
        scores = jnp.einsum("bkth,bksh->bkts", self.heads(self.q(x)), held["k"], preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores + bias, axis=-1).astype(held["v"].dtype)
        mixed = jnp.einsum("bkts,bksh->bkth", weights, held["v"])
        return self.o(jnp.swapaxes(mixed, 1, 2).reshape(*x.shape[:2], -1).astype(x.dtype))


class FeedForward(nnx.Module):
    """Feed-forward, gated or not."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        c = self.config = config
        common: dict[str, Any] = {"bias": False, "block": 0, "dtype": c.dtype, "rngs": rngs}
        self.gate = Projection(c.intermediate_size, c.hidden_size, **common) if c.gated else None
        self.up = Projection(c.intermediate_size, c.hidden_size, **common)
        self.down = Projection(c.hidden_size, c.intermediate_size, **common)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, E]` to `[B, T, E]`."""
        kind = self.config.activation
        hidden = activate(kind, self.up(x)) if self.gate is None else activate(kind, self.gate(x), self.up(x))
        return self.down(hidden)


class Block(nnx.Module):
    """Self-attention, in the decoder cross-attention, and feed-forward, a norm before each."""

    def __init__(self, config: T5Config, *, decoder: bool, rngs: nnx.Rngs):
        c = config
        self.attention, self.attention_norm = Attention(c, rngs=rngs), _norm(c)
        self.cross = Attention(c, rngs=rngs) if decoder else None
        self.cross_norm = _norm(c) if decoder else None
        self.mlp, self.mlp_norm = FeedForward(c, rngs=rngs), _norm(c)


class Stack(nnx.Module):
    """The blocks of the encoder or of the decoder, with one table of relative positions for all."""

    def __init__(self, config: T5Config, *, decoder: bool, rngs: nnx.Rngs):
        c = self.config = config
        self.decoder, self.layers = decoder, c.decoder_layers if decoder else c.encoder_layers
        self.distances = Embedding(c.buckets, c.num_heads, block=0, dtype=c.dtype, rngs=rngs)
        for i in range(self.layers):
            setattr(self, f"layer_{i}", Block(c, decoder=decoder, rngs=rngs))
        self.norm = _norm(c)

    def bias(self, queries: jax.Array, keys: jax.Array, mask: jax.Array) -> jax.Array:
        """What is added to scores, `[B, K, T, S]`, for positions `[B, T]` and `[B, S]` and a mask `[B, T, S]`."""
        c, behind = self.config, queries[:, :, None] - keys[:, None, :]
        rows = bucket(behind, both_ways=not self.decoder, buckets=c.buckets, max_distance=c.max_distance)
        bias = jnp.moveaxis(self.distances(rows).astype(jnp.float32), -1, 1)
        return jnp.where(mask[:, None], bias, jnp.finfo(jnp.float32).min)


def _norm(c: T5Config) -> Norm:
    return Norm(c.hidden_size, c.norm_eps, c.dtype)


class T5(nnx.Module):
    """Encoder, decoder and output projection."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        c = self.config = config
        table: dict[str, Any] = {"block": 0, "dtype": c.dtype, "rngs": rngs}
        self.embed = Embedding(c.vocab_size, c.hidden_size, **table)
        self.encoder = Stack(c, decoder=False, rngs=rngs)
        self.decoder = Stack(c, decoder=True, rngs=rngs)
        self.head = None if c.tied else Embedding(c.vocab_size, c.hidden_size, **table)

    def encode(self, tokens: jax.Array, lengths: jax.Array) -> dict[str, Any]:
        """Runs the encoder.

        Args:
          tokens: `[B, S]` int32 ids, padded at the end.
          lengths: `[B]` int32.

        Returns:
          for each decoder layer keys and values `[B, K, S, H]`, and `mask` `[B, S]`.
        """
        x, stack = self.embed(tokens), self.encoder
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        mask = positions < lengths[:, None]
        bias = stack.bias(positions, positions, jnp.broadcast_to(mask[:, None], (*tokens.shape, tokens.shape[1])))
        for i in range(stack.layers):
            block = getattr(stack, f"layer_{i}")
            y = block.attention_norm(x)
            x = x + block.attention(y, block.attention.keys_values(y), bias)
            x = x + block.mlp(block.mlp_norm(x))
        x = stack.norm(x)
        layers = {f"layer_{i}": getattr(self.decoder, f"layer_{i}") for i in range(self.decoder.layers)}
        return {name: block.cross.keys_values(x) for name, block in layers.items()} | {"mask": mask}

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Cache,
        start: jax.Array,
        inputs: dict[str, Any],
    ) -> tuple[jax.Array, Cache]:
        """See `Model.forward`; `inputs` is what `encode` returned, for as many rows or for one that all share."""
        c, stack, slots = self.config, self.decoder, mask.shape[-1]
        held = jnp.broadcast_to(jnp.arange(slots, dtype=positions.dtype), (positions.shape[0], slots))
        bias = stack.bias(positions, lax.dynamic_update_slice(held, positions, (0, start)), mask)
        seen = jnp.where(inputs["mask"][:, None, None], 0.0, jnp.finfo(jnp.float32).min)
        x, written = self.embed(tokens), {}
        for i in range(stack.layers):
            name = f"layer_{i}"
            block = getattr(stack, name)
            y = block.attention_norm(x)
            new = block.attention.keys_values(y)
            written[name] = {k: write(cache[name][k], new[k], start, axis=2) for k in ("k", "v")}
            x = x + block.attention(y, written[name], bias)
            rows = {k: jnp.broadcast_to(inputs[name][k], (x.shape[0], *inputs[name][k].shape[1:])) for k in ("k", "v")}
            x = x + block.cross(block.cross_norm(x), rows, seen)
            x = x + block.mlp(block.mlp_norm(x))
        x = stack.norm(x)
        x = x * jnp.asarray(c.hidden_size**-0.5, x.dtype) if c.scaled else x
        return (self.embed if self.head is None else self.head).logits(x), written


@dataclasses.dataclass(frozen=True)
class T5Model:
    """The decoder of a T5 as a `Model`.

    Its parameters are `{"weights": ..., "inputs": ...}`: `with_inputs` makes them.
    """

    config: T5Config

    @property
    def vocab_size(self) -> int:
        """`V`."""
        return self.config.vocab_size

    @property
    def max_length(self) -> None:
        """Positions have no limit."""
        return None

    @property
    def start_token(self) -> int:
        """The id that a response starts behind."""
        return self.config.start_token

    def module(self, weights: Params) -> T5:
        """The module with these weights, to train or inspect."""
        graph, _ = nnx.split(nnx.eval_shape(lambda: T5(self.config, rngs=nnx.Rngs(0))))
        return nnx.merge(graph, weights)

    def init_cache(self, batch: int, slots: int) -> Cache:
        """For each decoder layer keys and values `[B, K, S, H]` of self-attention."""
        c = self.config
        shape = (batch, c.num_heads, slots, c.head_size)
        return {f"layer_{i}": {name: jnp.zeros(shape, c.dtype) for name in ("k", "v")} for i in range(c.decoder_layers)}

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Cache,
        start: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """See `Model`."""
        return self.module(params["weights"])(tokens, positions, mask, cache, start, params["inputs"])

    def with_inputs(self, weights: Params, inputs: Sequence[Sequence[int]]) -> Params:
        """Encodes one input a row, or one for all rows, and returns the decoder's parameters.

        Inputs are padded to the next of `INPUT_SIZES`, so few shapes compile.
        """
        longest = max(map(len, inputs))
        size = next((size for size in INPUT_SIZES if size >= longest), longest)
        tokens = np.zeros((len(inputs), size), np.int32)
        for row, ids in zip(tokens, inputs, strict=True):
            row[: len(ids)] = ids
        lengths = np.array([len(ids) for ids in inputs], np.int32)
        return {"weights": weights, "inputs": _encode(self, weights, tokens, lengths)}


def _encode_rows(model: T5Model, weights: Params, tokens: jax.Array, lengths: jax.Array) -> dict[str, Any]:
    return model.module(weights).encode(tokens, lengths)


_encode = jax.jit(_encode_rows, static_argnums=0)
