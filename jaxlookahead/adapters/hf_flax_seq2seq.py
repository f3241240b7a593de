"""Flax encoder-decoders of `transformers` 4.39 to 4.57 (T5, Bart) for `encoder_decoder.generate`, unmodified."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlookahead.models.protocol import Cache, Params
from jaxlookahead.models.t5 import INPUT_SIZES

SUPPORTED = ("bart", "t5")


@dataclasses.dataclass(frozen=True, eq=False)
class HfFlaxSeq2Seq:
    """A `Model` that calls a decoder with an encoder. Equal to itself alone: make one and keep it.

    Its parameters are `{"weights": ..., "inputs": ...}`: `with_inputs` makes them. The package computes the keys and
    values of cross-attention anew at each step; the built-in `models.t5` does not.

    Attributes:
      flax_model: the `Flax...ForConditionalGeneration`, without its weights.
      cache_shapes: for each path of the decoder's cache the shape for one row of one slot, and the dtype.
    """

    flax_model: Any
    cache_shapes: tuple[tuple[tuple[str, ...], tuple[int, ...], Any], ...]

    @property
    def vocab_size(self) -> int:
        """`V`."""
        return self.flax_model.config.vocab_size

    @property
    def max_length(self) -> int | None:
        """The most positions of a response; T5 has no limit."""
        return self.flax_model.config.max_position_embeddings if self._bart else None

    @property
    def start_token(self) -> int:
        """The id that a response starts behind."""
        return self.flax_model.config.decoder_start_token_id or 0

    @property
    def _bart(self) -> bool:
        return self.flax_model.config.model_type == "bart"

    def init_cache(self, batch: int, slots: int) -> Cache:
        """For each self-attention of the decoder its keys and values, `[B, S, K, H]`, without the write index."""
        return {
            "/".join(path): jnp.zeros((batch, slots, *shape[2:]), dtype) for path, shape, dtype in self.cache_shapes
        }

    def with_inputs(self, weights: Params, inputs: Sequence[Sequence[int]]) -> Params:
        """Encodes one input a row, or one for all rows, and returns the decoder's parameters."""
        longest = max(map(len, inputs))
        size = next((size for size in INPUT_SIZES if size >= longest), longest)
        if self._bart and self.max_length is not None:
            size = max(min(size, self.flax_model.config.max_position_embeddings), longest)
        tokens, mask = np.zeros((2, len(inputs), size), np.int32)
        for row, seen, ids in zip(tokens, mask, inputs, strict=True):
            row[: len(ids)], seen[: len(ids)] = ids, 1
        hidden = self.flax_model.encode(tokens, mask, params=weights, return_dict=False)[0]
        return {"weights": weights, "inputs": {"hidden": hidden, "mask": jnp.asarray(mask)}}

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Cache,
        start: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """See `Model`; as in `adapters.hf_flax`, rows are mapped over, and the modules' own masks replaced."""
        if self._bart and self.max_length is not None:
            # Padding may lie beyond the table of positions, which gives NaN there.
            positions = jnp.minimum(positions, self.max_length - 1)
        held = {name: jnp.broadcast_to(x, (len(tokens), *x.shape[1:])) for name, x in params["inputs"].items()}

        def row(tokens: jax.Array, positions: jax.Array, mask: jax.Array, cache: Cache, held: Any) -> Any:
            return self._row(params["weights"], tokens, positions, mask, cache, start, held)

        return jax.vmap(row)(tokens, positions, mask, cache, held)

    def _row(
        self,
        weights: Params,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Cache,
        start: jax.Array,
        held: dict[str, jax.Array],
    ) -> tuple[jax.Array, Cache]:
        from flax import linen
        from flax.traverse_util import flatten_dict, unflatten_dict

        slots = mask.shape[-1]

        def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            module, method = context.module, context.method_name
            if method == "__call__" and hasattr(module, "causal_mask"):
                object.__setattr__(module, "causal_mask", mask[None, None])
            if method == "_create_position_bias" and module.causal:
                keys = lax.dynamic_update_slice(jnp.arange(slots, dtype=positions.dtype), positions, (start,))
                return _position_bias(module, positions, keys, mask)
            return call(*args, **kwargs)

        filled = {tuple(name.split("/")): leaf[None] for name, leaf in cache.items()}
        for path in list(filled):
            filled[(*path[:-1], "cache_index")] = start
        with linen.intercept_methods(intercept):
            logits, changed, *_ = self.flax_model.decode(
                tokens[None],
                (held["hidden"][None],),
                encoder_attention_mask=held["mask"][None],
                decoder_attention_mask=jnp.ones((1, slots), jnp.int32),
                past_key_values=unflatten_dict(filled),
                params=weights,
                return_dict=False,
                **({"decoder_position_ids": positions[None]} if self._bart else {}),
            )
        written = flatten_dict(changed)
        return logits[0], {name: written[tuple(name.split("/"))][0] for name in cache}


def _position_bias(module: Any, queries: jax.Array, keys: jax.Array, mask: jax.Array) -> jax.Array:
    """T5's bias `[1, K, T, S]` by positions `[T]` and `[S]`, where the module's own goes by slot."""
    rows = module._relative_position_bucket(
        keys[None] - queries[:, None],
        bidirectional=False,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )
    bias = jnp.moveaxis(module.relative_attention_bias(rows), -1, 0)
    # The module adds its causal mask by slot, which hides nothing more: parents lie before their children.
    return jnp.where(mask[None], bias, jnp.finfo(bias.dtype).min / 2)[None]


def from_hf_flax_seq2seq(flax_model: Any) -> tuple[HfFlaxSeq2Seq, Params]:
    """Takes model and weights out of a `FlaxT5ForConditionalGeneration` or `FlaxBartForConditionalGeneration`.

    Raises:
      TypeError: a model of another type, or without logits of tokens.
    """
    kind = getattr(getattr(flax_model, "config", None), "model_type", None)
    name = type(flax_model).__name__
    if kind not in SUPPORTED:
        raise TypeError(
            f"Flax encoder-decoders of type {kind!r} ({name}) are not supported; supported: {', '.join(SUPPORTED)}"
        )
    if not name.endswith("ForConditionalGeneration"):
        raise TypeError(f"{name} has no logits of tokens; use the Flax...ForConditionalGeneration of its kind")
    from flax.traverse_util import flatten_dict

    outputs = (jnp.zeros((1, 1, flax_model.config.d_model)),)
    shapes = flatten_dict(jax.eval_shape(lambda: flax_model.init_cache(1, 1, outputs)))
    kept = tuple((path, leaf.shape, leaf.dtype) for path, leaf in sorted(shapes.items()) if len(leaf.shape) == 4)
    light = copy.copy(flax_model)
    light._params = None
    return HfFlaxSeq2Seq(light, kept), flax_model.params
