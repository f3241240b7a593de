"""Checkpoint tensors, one by one, into the built-in decoder's parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlookahead.models.config import DecoderConfig
from jaxlookahead.models.protocol import Model, Params
from jaxlookahead.models.targets import fill, full_name, targets, unused

Path = tuple[str, ...]
Placement = jax.sharding.Sharding | Callable[[Path, tuple[int, ...]], jax.sharding.Sharding] | None

# Outputs per block where parameters stay on one CPU: the width of XLA's product kernel for float32.
CPU_BLOCK = 64


class ParamsBuilder:
    """Takes the tensors of a Hugging Face checkpoint in any order and returns a model and its parameters.

    A parameter that several tensors make up (query, key and value; gate and up) is put together in host memory and
    leaves it, to its device, with its last tensor: the host never holds more than the parameters and one tensor.

    Args:
      config: of the model.
      dtype: of the parameters and the cache; None: the configuration's.
      sharding: where parameters go: None (the default device), one sharding for all, or a function of a parameter's
        path (names from the root) and shape. Where none is given, on CPU, and the configuration leaves `block`
        open, weights are laid out in blocks of 64 outputs.
    """

    def __init__(self, config: DecoderConfig, dtype: Any = None, sharding: Placement = None):
        from flax import nnx

        from jaxlookahead.models.decoder import Decoder
        from jaxlookahead.models.flax_nnx import from_nnx

        if config.block is None:
            plain = sharding is not None or jax.default_backend() != "cpu"
            config = dataclasses.replace(config, block=0 if plain else CPU_BLOCK)
        self.config = dataclasses.replace(config, dtype=jnp.dtype(config.dtype if dtype is None else dtype).name)
        self._sharding = sharding
        self._model, self._tree = from_nnx(nnx.eval_shape(lambda: Decoder(self.config, rngs=nnx.Rngs(0))))
        self._shapes = {_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(self._tree)}
        self._targets = targets(self.config)
        self._waiting: dict[Path, int] = dict.fromkeys(self._shapes, 0)
        for where in self._targets.values():
            for piece in where.pieces:
                self._waiting[piece.path] += 1
        self._missing = set(self._targets)
        self._partial: dict[Path, np.ndarray] = {}
        self._done: dict[Path, jax.Array] = {}

    def add(self, name: str, array: np.ndarray) -> None:
        """Takes one tensor.

        Args:
          name: its Hugging Face name; a missing prefix (`model.`, `transformer.`) is understood.
          array: its values in the checkpoint's shape, of any dtype that numpy casts.

        Raises:
          ValueError: the name is unknown or came before, or the shape is not the configuration's.
        """
        if unused(self.config, name):
            return
        full = name if name in self._targets else full_name(self.config, name)
        where = self._targets.get(full)
        if where is None:
            raise ValueError(f"the checkpoint holds {name!r}, which the model has no place for")
        if full not in self._missing:
            raise ValueError(f"the checkpoint holds {name!r} twice")
        padded = where.more_rows and array.ndim == 2 and array.shape[0] >= where.shape[0]
        if array.shape != (((array.shape[0],) if padded else where.shape[:1]) + where.shape[1:]):
            raise ValueError(f"{name!r} has shape {array.shape}; the configuration asks for {where.shape}")
        self._missing.remove(full)
        array = array.T if where.transposed else array
        for piece in where.pieces:
            path = piece.path
            if path not in self._partial:
                self._partial[path] = np.zeros(self._shapes[path].shape, self._shapes[path].dtype)
            fill(self._partial[path], piece, array)
            self._waiting[path] -= 1
            if not self._waiting[path]:
                self._done[path] = self._place(path, self._partial.pop(path))

    def finish(self) -> tuple[Model, Params]:
        """Returns the model and its parameters, nested dicts of arrays.

        Raises:
          ValueError: tensors are missing; all are named.
        """
        if self._missing:
            raise ValueError(f"the checkpoint lacks {len(self._missing)} tensors: {', '.join(sorted(self._missing))}")
        params = jax.tree_util.tree_map_with_path(lambda path, _: self._done[_names(path)], self._tree)
        return self._model, params

    def _place(self, path: Path, leaf: np.ndarray) -> jax.Array:
        sharding = self._sharding
        if callable(sharding):
            sharding = sharding(path, leaf.shape)
        return jax.device_put(leaf, sharding)


def _names(path: tuple[Any, ...]) -> Path:
    return tuple(key.key for key in path)
