"""Flax models of `transformers` 4.39 to 4.57 as a `Model`, unmodified."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxlookahead.models.decoder import windowed
from jaxlookahead.models.protocol import Cache, Params

SUPPORTED = ("gemma", "gpt2", "gpt_neo", "gptj", "llama", "mistral", "opt")


@dataclasses.dataclass(frozen=True, eq=False)
class HfFlaxModel:
    """A `Model` that calls the module of a `FlaxPreTrainedModel`. Equal to itself alone: make one and keep it.

    Attributes:
      module: the linen module.
      config: its configuration.
      cache_shapes: for each path of the module's cache the shape for one row of one slot, and the dtype.
    """

    module: Any
    config: Any
    cache_shapes: tuple[tuple[tuple[str, ...], tuple[int, ...], Any], ...]

    @property
    def vocab_size(self) -> int:
        """`V`."""
        return self.config.vocab_size

    @property
    def max_length(self) -> int:
        """The most positions."""
        return self.config.max_position_embeddings

    def init_cache(self, batch: int, slots: int) -> Cache:
        """For each attention its keys and values, `[B, S, K, H]`, without the write index."""
        return {
            "/".join(path): jnp.zeros((batch, slots, *shape[2:]), dtype) for path, shape, dtype in self.cache_shapes
        }

    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: Cache,
        start: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """See `Model`.

        These modules cut each step's mask out of a causal mask that all rows share. So rows are mapped over, and the
        attention modules get the contract's mask in place of the causal one.
        """
        # Padding may lie beyond the tables of positions, which give NaN there.
        positions = jnp.minimum(positions, self.max_length - 1)
        masks = {str(kind): windowed(mask, positions, start, self._window(kind)) for kind in self._kinds()}

        def row(tokens: jax.Array, positions: jax.Array, masks: Any, cache: Cache) -> tuple[jax.Array, Cache]:
            return self._row(params, tokens, positions, masks, cache, start)

        return jax.vmap(row)(tokens, positions, masks, cache)

    def _row(
        self, params: Params, tokens: jax.Array, positions: jax.Array, masks: Any, cache: Cache, start: jax.Array
    ) -> tuple[jax.Array, Cache]:
        from flax import linen
        from flax.traverse_util import flatten_dict, unflatten_dict

        def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            if context.method_name == "__call__" and hasattr(context.module, "causal_mask"):
                mask = masks[str(getattr(context.module, "attention_type", None))]
                object.__setattr__(context.module, "causal_mask", mask[None, None])
            return call(*args, **kwargs)

        slots = jax.tree.leaves(masks)[0].shape[-1]
        filled = {tuple(name.split("/")): leaf[None] for name, leaf in cache.items()}
        for path in list(filled):
            filled[(*path[:-1], "cache_index")] = start
        with linen.intercept_methods(intercept):
            outputs, changed = self.module.apply(
                {"params": params, "cache": unflatten_dict(filled)},
                input_ids=tokens[None],
                attention_mask=jnp.ones((1, slots), jnp.int32),
                position_ids=positions[None],
                deterministic=True,
                return_dict=False,
                mutable=["cache"],
            )
        written = flatten_dict(changed["cache"])
        return outputs[0][0], {name: written[tuple(name.split("/"))][0] for name in cache}

    def _kinds(self) -> tuple[str | None, ...]:
        if self.config.model_type == "gpt_neo":
            return tuple(set(self.config.attention_layers))
        return (None,)

    def _window(self, kind: str | None) -> int | None:
        """How many positions back, its own included, an attention sees."""
        if self.config.model_type == "gpt_neo":
            return self.config.window_size if kind == "local" else None
        if self.config.model_type == "mistral" and self.config.sliding_window is not None:
            # The Flax code keeps one position more than the window's name says.
            return self.config.sliding_window + 1
        return None


def from_hf_flax(flax_model: Any) -> tuple[HfFlaxModel, Params]:
    """Takes the module and the parameters out of a `Flax...ForCausalLM` (`...LMHeadModel`) of `transformers`.

    Args:
      flax_model: of one of the types `gemma`, `gpt2`, `gpt_neo`, `gptj`, `llama`, `mistral`, `opt`.

    Raises:
      TypeError: a model of another type, or without logits of tokens.
    """
    config = getattr(flax_model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in SUPPORTED:
        raise TypeError(
            f"Flax models of type {kind!r} ({type(flax_model).__name__}) are not supported; supported: "
            f"{', '.join(SUPPORTED)}"
        )
    if not type(flax_model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        raise TypeError(f"{type(flax_model).__name__} has no logits of tokens; use the Flax...ForCausalLM of its kind")
    from flax.traverse_util import flatten_dict

    shapes = flatten_dict(jax.eval_shape(lambda: flax_model.init_cache(1, 1)))
    kept = tuple((path, leaf.shape, leaf.dtype) for path, leaf in sorted(shapes.items()) if len(leaf.shape) == 4)
    return HfFlaxModel(flax_model.module, config, kept), flax_model.params
