"""Flax nnx modules as a `Model`, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from jaxlookahead.models.protocol import Cache, Params


@dataclasses.dataclass(frozen=True, eq=False)
class NnxModel:
    """A `Model` that calls an nnx module of the contract's signature without its `params`.

    Two of them are equal where the modules have the same structure, static fields and shapes.

    Attributes:
      graphdef: the module without its arrays.
      shapes: shape and dtype of every array, in the order of the flattened parameters.
      vocab_size: `V`.
      max_length: the most positions, or None.
    """

    graphdef: nnx.GraphDef[Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    treedef: Any
    vocab_size: int
    max_length: int | None
    _hash: int = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        # The graph is long and a jitted call hashes its static arguments every time.
        key = (self.treedef, self.shapes, self.vocab_size, self.max_length)
        try:
            found = hash((self.graphdef, *key))
        except TypeError:
            # The module holds something that can be compared but not hashed, such as a dataclass that isn't frozen.
            found = hash(key)
        object.__setattr__(self, "_hash", found)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, NnxModel) or self._hash != other._hash:
            return False
        return all(getattr(self, f.name) == getattr(other, f.name) for f in dataclasses.fields(self))

    def abstract_params(self) -> Params:
        """Shapes and dtypes of the parameters, in the tree that `forward` takes."""
        return jax.tree.unflatten(self.treedef, self.shapes)

    def init_cache(self, batch: int, slots: int) -> Cache:
        """See `Model`."""
        return nnx.merge(self.graphdef, self.abstract_params()).init_cache(batch, slots)

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
        return nnx.merge(self.graphdef, params)(tokens, positions, mask, cache, start)


def from_nnx(module: Any) -> tuple[NnxModel, Params]:
    """Splits a module into a `Model` and its parameters.

    Args:
      module: an nnx module with `vocab_size`, `max_length`, `init_cache(batch, slots)` and
        `__call__(tokens, positions, mask, cache, start)` as the `Model` contract describes them.

    Returns:
      the model, and the parameters as nested dicts of arrays. The arrays are shared with the module.
    """
    lacking = [n for n in ("vocab_size", "max_length", "init_cache", "__call__") if not hasattr(module, n)]
    if lacking:
        raise TypeError(f"module {type(module).__name__} lacks {', '.join(lacking)}, which a Model needs")
    graphdef, state = nnx.split(module)
    params = nnx.to_pure_dict(state)
    leaves, treedef = jax.tree.flatten(params)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    return NnxModel(graphdef, shapes, treedef, module.vocab_size, module.max_length), params


def to_nnx(model: NnxModel, params: Params) -> nnx.Module:
    """The module of `from_nnx` with these parameters, to train or inspect; `from_nnx` gives the same model again."""
    return nnx.merge(model.graphdef, params)
