"""Compiles the decoding step for TPUs that aren't there, and tells what the compiler made of it.

The step is the engine's own, compiled from shapes. Needs libtpu (`pip install "jax[tpu]"`), which runs on any x86 Linux
machine. Set `TPU_SKIP_MDS_QUERY=1` and `JAX_PLATFORMS=cpu` before jax is imported.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxlookahead import cache as caches
from jaxlookahead.bench.hlo import Program
from jaxlookahead.bench.shapes import abstract_model, tensor_parallel
from jaxlookahead.engine import compiled
from jaxlookahead.mesh import cache_specs

AXIS = "model"


@dataclasses.dataclass(frozen=True)
class Compilation:
    """What the compiler made of a step. Bytes are those of one device.

    Attributes:
      topology: of the TPUs.
      model: name of the shapes.
      devices: that the step runs on.
      rows: `B`.
      slots: `S`.
      width: `N`.
      seconds: to compile.
      bytes: read from and written to main memory in a step.
      bytes_by_xla: the compiler's own count, see `bench.hlo`.
      params: bytes of the parameters.
      cache: bytes of the cache.
      temporary: bytes of temporary memory, the core's own that weights are fetched ahead to included.
      aliased: bytes of the results that lie where the donated arguments were.
      cache_copies: copies of a whole leaf of the cache within main memory.
      collectives: counts by kind and outermost scope, such as `all-reduce in forward`.
    """

    topology: str
    model: str
    devices: int
    rows: int
    slots: int
    width: int
    seconds: float
    bytes: int
    bytes_by_xla: int
    params: int
    cache: int
    temporary: int
    aliased: int
    cache_copies: int
    collectives: dict[str, int]

    @property
    def cache_aliased(self) -> bool:
        """Whether the whole cache stays where it is."""
        return self.aliased >= self.cache and not self.cache_copies


def topology_devices(topology: str) -> Sequence[Any]:
    """The devices of a topology such as `v5e:2x2`.

    Raises:
      ImportError: libtpu is not installed.
      ValueError: there is no such topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError('compiling for TPU needs libtpu: pip install "jax[tpu]"')
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:
        raise ValueError(f"topology {topology!r} can't be had: {error}") from error


def measure(
    topology: str,
    models: Sequence[str],
    *,
    widths: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    slots: int = 1024,
    rows: int = 1,
    devices: int = 1,
    layers: int | None = None,
    keep: Callable[[Compilation, str], None] | None = None,
) -> Iterator[Compilation]:
    """Compiles a greedy step for each model and width.

    Args:
      topology: such as `v5e:2x2` or `v6e:2x4`.
      models: names of `shapes.CONFIGS`.
      widths: `N`.
      slots: `S`.
      rows: `B`.
      devices: how many of the topology's devices share the model, tensor parallel.
      layers: only so many of each model's layers.
      keep: called with each compilation and its program's text.
    """
    found = topology_devices(topology)
    if not 1 <= devices <= len(found):
        raise ValueError(f"devices must be 1 to {len(found)} for topology {topology!r}, got {devices}")
    mesh = None
    if devices > 1:
        mesh = Mesh(np.array(found[:devices]), (AXIS,), axis_types=(AxisType.Auto,))
    everywhere = SingleDeviceSharding(found[0]) if mesh is None else NamedSharding(mesh, PartitionSpec())
    for name in models:
        model, params = abstract_model(name, layers=layers)
        calls: Any = compiled(model, "tpu", mesh)
        state = _at(jax.eval_shape(lambda calls=calls: calls.start(rows, slots, (1, 1, 1), False)), everywhere)
        cache = _at(jax.eval_shape(lambda calls=calls: calls.allocate(rows, slots)), everywhere)
        if mesh is not None:
            specs = cache_specs(cache, caches.find_axes(model), mesh)
            cache = _at(cache, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
        params = _at(params, everywhere if mesh is None else tensor_parallel(params, mesh, AXIS))
        shapes = {leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(cache)}
        for width in widths:
            packed = _at(jax.ShapeDtypeStruct((2, rows, width), jnp.int32), everywhere)
            start = time.perf_counter()
            program = calls.step.lower(params, cache, state, packed, None).compile()
            seconds = time.perf_counter() - start
            text, memory = program.as_text(), program.memory_analysis()
            parsed = Program.parse(text)
            counts: dict[str, int] = {}
            for (kind, scope), count in parsed.collectives().items():
                key = f"{kind} in {_phase(scope)}"
                counts[key] = counts.get(key, 0) + count
            done = Compilation(
                topology=topology,
                model=name,
                devices=devices,
                rows=rows,
                slots=slots,
                width=width,
                seconds=seconds,
                bytes=int(parsed.traffic()),
                bytes_by_xla=int(_cost(program)["bytes accessed"]),
                params=_bytes(params),
                cache=_bytes(cache),
                temporary=memory.temp_size_in_bytes,
                aliased=memory.alias_size_in_bytes,
                cache_copies=len(parsed.copies(shapes)),
                collectives=counts,
            )
            if keep is not None:
                keep(done, text)
            yield done


def _at(tree: Any, where: Sharding | Any) -> Any:
    if isinstance(where, Sharding):
        where = jax.tree.map(lambda _: where, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where)


def _bytes(tree: Any) -> int:
    """Of one device's share."""
    sizes = ((leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree))
    return sum(int(np.prod(shape)) * size for shape, size in sizes)


def _cost(program: Any) -> dict[str, float]:
    cost = program.cost_analysis()
    return cost[0] if isinstance(cost, list) else cost


def _phase(scope: str) -> str:
    """`forward` of `jit(step)/forward/layer_0/...`."""
    phases = ("tree", "forward", "accept", "commit")
    return next((part for part in scope.split("/") if part in phases), "other")
