"""T5 checkpoints: tensors by their Hugging Face names into the parameters of `models.t5`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlookahead.models.protocol import Params
from jaxlookahead.models.t5 import T5, T5Config, T5Model

_BLOCK = re.compile(r"(encoder|decoder)\.block\.(\d+)\.layer\.(\d)\.([\w.]+)\.weight")
_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_PARTS = {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}


def build(
    config: Mapping[str, Any], tensors: Iterable[tuple[str, np.ndarray]], dtype: Any = "float32"
) -> tuple[T5Model, Params]:
    """Returns the model and its weights, nested dicts of arrays.

    Raises:
      ValueError: a tensor is unknown, missing or of another shape, named.
    """
    from flax import nnx

    held = dict(tensors)
    read = T5Config.from_hf(config, dtype=jnp.dtype(dtype).name)
    # Configurations of transformers 5 call both kinds tied.
    model = T5Model(dataclasses.replace(read, tied=read.scaled or "lm_head.weight" not in held))
    module = nnx.eval_shape(lambda: T5(model.config, rngs=nnx.Rngs(0)))
    shapes = nnx.to_pure_dict(nnx.state(module))
    wanted = {tuple(k.key for k in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
    found: dict[tuple[str, ...], jax.Array] = {}
    for name, array in held.items():
        if name in _COPIES or (name == "lm_head.weight" and model.config.tied):
            continue
        path = _path(name)
        if path not in wanted:
            raise ValueError(f"the checkpoint holds {name!r}, which the model has no place for")
        if array.shape != wanted[path].shape:
            raise ValueError(f"{name!r} has shape {array.shape}; the configuration asks for {wanted[path].shape}")
        found[path] = jnp.asarray(array, wanted[path].dtype)
    missing = sorted(".".join(path) for path in set(wanted) - set(found))
    if missing:
        raise ValueError(f"the checkpoint lacks the tensors of {len(missing)} parameters: {', '.join(missing)}")
    return model, jax.tree_util.tree_map_with_path(lambda path, _: found[tuple(k.key for k in path)], shapes)


def _path(name: str) -> tuple[str, ...] | None:
    whole = {
        "shared.weight": ("embed", "weight"),
        "lm_head.weight": ("head", "weight"),
        "encoder.final_layer_norm.weight": ("encoder", "norm", "scale"),
        "decoder.final_layer_norm.weight": ("decoder", "norm", "scale"),
    }
    if name in whole:
        return whole[name]
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None
    stack, layer, place, part = match[1], match[2], int(match[3]), match[4]
    kinds = ("attention", "cross", "mlp") if stack == "decoder" else ("attention", "mlp")
    if place >= len(kinds):
        return None
    kind = kinds[place]
    if part == "layer_norm":
        return (stack, f"layer_{layer}", f"{kind}_norm", "scale")
    if part.endswith("relative_attention_bias"):
        return (stack, "distances", "weight")
    last = part.rpartition(".")[2]
    return (stack, f"layer_{layer}", kind, _PARTS.get(last, last), "weight")
