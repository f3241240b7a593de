"""Running the compiled calls where the parameters are, on any mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxlookahead import cache as caches
from jaxlookahead.cache import Axes
from jaxlookahead.layout import on_one_device
from jaxlookahead.models.protocol import Cache, Params

REPLICATED = PartitionSpec()


def mesh_of(params: Params) -> Mesh | None:
    """The mesh of several devices that the parameters lie on, None on a single device."""
    for leaf in jax.tree.leaves(params):
        sharding = getattr(leaf, "sharding", None)
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if isinstance(mesh, Mesh) and mesh.size > 1:
            return mesh
    return None


def cache_specs(cache: Cache, axes: Sequence[Axes], mesh: Mesh | None) -> Any:
    """How a cache lies on a mesh: divided over the mesh's last axis along the heads, or replicated.

    The heads are a leaf's first axis that is neither of rows nor of slots. Nothing done to a cache crosses them,
    so that its devices need not talk about it.

    Args:
      cache: arrays or their shapes.
      axes: from `cache.find_axes`.
      mesh: None: no mesh.
    """

    def spec(axis: Axes, shape: tuple[int, ...]) -> PartitionSpec:
        heads = next((i for i in range(len(shape)) if i not in axis), None)
        if mesh is None or heads is None or shape[heads] % mesh.devices.shape[-1]:
            return PartitionSpec()
        return PartitionSpec(*[None] * heads, mesh.axis_names[-1])

    leaves, treedef = jax.tree.flatten(cache)
    return jax.tree.unflatten(treedef, [spec(*x) for x in zip(axes, (leaf.shape for leaf in leaves), strict=True)])


def checked_specs(cache: Cache, mesh: Mesh | None, spec: Any) -> list[PartitionSpec]:
    """The user's choice instead of `cache_specs`: a `PartitionSpec` for each leaf of the cache.

    Args:
      cache: shapes of its arrays.
      mesh: that the parameters lie on.
      spec: the option `cache_spec` of `generate`.

    Raises:
      ValueError: there is no mesh, or the cache can't lie on it like that.
    """
    if mesh is None:
        raise ValueError(
            f"cache_spec is {spec!r}, but the parameters lie on one device; place them on a mesh with jax.device_put, "
            "or leave cache_spec out"
        )

    def is_spec(x: Any) -> bool:
        return isinstance(x, PartitionSpec)

    try:
        specs = jax.tree.leaves(jax.tree.broadcast(spec, cache, is_leaf=is_spec), is_leaf=is_spec)
        for leaf, shape in zip(specs, jax.tree.leaves(cache), strict=True):
            NamedSharding(mesh, leaf).shard_shape(shape.shape)
    except (ValueError, TypeError) as error:
        raise ValueError(f"cache_spec {spec!r} does not fit the cache on the mesh: {error}") from None
    return specs


def rows_of(specs: Sequence[PartitionSpec], axes: Sequence[Axes]) -> set[Any]:
    """The mesh axes that the rows of a cache are divided over, one entry if all leaves agree."""
    return {spec[axis.batch] if axis.batch < len(spec) else None for axis, spec in zip(axes, specs, strict=True)}


def with_whole_rows(specs: Any, axes: Sequence[Axes]) -> Any:
    """The same specs without a division of rows, for caches of few rows."""
    leaves, treedef = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    whole = [
        PartitionSpec(*(None if i == axis.batch else entry for i, entry in enumerate(spec)))
        for axis, spec in zip(axes, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, whole)


def commit_on_mesh(mesh: Mesh | None, specs: Any, axes: Sequence[Axes]) -> Callable[..., Cache]:
    """`cache.commit` where the cache lies as `specs` says: each device moves its own part.

    Args:
      mesh: None is `cache.commit` itself.
      specs: a `PartitionSpec` for each leaf.
      axes: from `cache.find_axes`.
    """
    if mesh is None:
        return caches.commit
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    rows = rows_of(leaves, axes)
    divided = [spec[axis.slot] for axis, spec in zip(axes, leaves, strict=True) if axis.slot < len(spec)]
    if len(rows) > 1 or any(divided):
        # Rows and slots of one leaf are on other devices than those of another: XLA has to sort it out.
        return caches.commit
    by_row = PartitionSpec(*rows)

    def commit(cache: Cache, axes: tuple[Axes, ...], start: jax.Array, lengths: jax.Array, path: jax.Array) -> Cache:
        def part(cache: Cache, start: jax.Array, lengths: jax.Array, path: jax.Array) -> Cache:
            with on_one_device():
                return caches.commit(cache, axes, start, lengths, path)

        # Inside `auto_axes` the mesh is that of the context, whose axes have other types.
        around = None if jax.sharding.get_abstract_mesh().shape else mesh
        in_specs = (specs, REPLICATED, by_row, by_row)
        mapped = jax.shard_map(part, mesh=around, in_specs=in_specs, out_specs=specs, check_vma=False)
        return mapped(cache, start, lengths, path)

    return commit


def jit_on_mesh(
    function: Callable[..., Any], mesh: Mesh | None, specs: Any = REPLICATED, **options: Any
) -> Callable[..., Any]:
    """`jax.jit` whose results are replicated over the mesh, or lie there as `specs` says.

    With a fixed sharding, what one call returns compiles nothing new in the next. Explicit axes, the default of
    `jax.make_mesh` since jax 0.9, become Auto ones inside, so that a model need not say how every product is sharded.

    Args:
      function: positional arguments only.
      mesh: from `mesh_of`; None is plain `jax.jit`.
      specs: a `PartitionSpec` for each result; one may stand for a whole tree of them.
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
