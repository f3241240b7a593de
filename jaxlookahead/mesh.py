"""Running the compiled calls where the parameters are, on any mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlookahead.models.protocol import Params

REPLICATED = PartitionSpec()


def mesh_of(params: Params) -> Mesh | None:
    """The mesh of several devices that the parameters lie on, None on a single device."""
    for leaf in jax.tree.leaves(params):
        sharding = getattr(leaf, "sharding", None)
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if isinstance(mesh, Mesh) and mesh.size > 1:
            return mesh
    return None


def jit_on_mesh(
    function: Callable[..., Any], mesh: Mesh | None, specs: Any = REPLICATED, **options: Any
) -> Callable[..., Any]:
    """`jax.jit` whose results lie on the mesh as `specs` says.

    With a fixed sharding, what one call returns compiles nothing new in the next. Explicit axes, the default of
    `jax.make_mesh` since jax 0.9, become Auto ones inside, so that a model need not say how every product is sharded.

    Args:
      function: positional arguments only.
      mesh: from `mesh_of`; None is plain `jax.jit`.
      specs: how the results lie, `PartitionSpec`s, a prefix of the results' structure; replicated by default.
      **options: of `jax.jit`.
    """
    if mesh is None:
        return jax.jit(function, **options)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    @functools.wraps(function)
    def place(*arguments: Any) -> Any:
        return jax.lax.with_sharding_constraint(function(*arguments), shardings)

    explicit = tuple(
        name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit
    )
    if not explicit:
        return jax.jit(place, **options)

    @functools.wraps(function)
    def automatic(*arguments: Any) -> Any:
        inside = jax.sharding.auto_axes(function, axes=explicit, out_sharding=specs)
        return inside(*arguments)

    jitted = jax.jit(automatic, **options)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        with jax.set_mesh(mesh):
            return jitted(*arguments)

    return call
