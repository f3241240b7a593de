"""Decoding with parameters spread over eight devices, in a process of its own that has them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_COMMON = """
import functools, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxlookahead.bench.hlo import Program
from jaxlookahead import cache as caches, decoding, engine, on_device, tree
from jaxlookahead.models.dummy import tiny_decoder
from jaxlookahead.results import first_difference
from jaxlookahead.sampling import Sampling

kind = AxisType[sys.argv[1]]
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
model, params = tiny_decoder(vocab_size=48, num_kv_heads=4)

def place(x):
    axis = next(i for i in range(x.ndim) if x.shape[i] % 4 == 0)
    return NamedSharding(mesh, P(*["model" if i == axis else None for i in range(x.ndim)]))

sharded = jax.tree.map(lambda x: jax.device_put(x, place(x)), params)
rng = np.random.default_rng(0)
prompts = [rng.integers(0, 48, n).tolist() for n in (1, 5, 40, 17)]
"""

_SAME_TOKENS = """
options = dict(max_new_tokens=24, sampling=[Sampling(), Sampling(temperature=1.0)] * 2)
plain = decoding.generate(model, params, prompts, drafter=None, **options)
engine.TRACES.clear()
for _ in range(2):
    drafted = decoding.generate(model, sharded, prompts, rows=3, **options)
    assert all(first_difference(a, b) is None for a, b in zip(plain, drafted)), "tokens differ"
twice = [key[1:] for key, count in engine.TRACES.items() if count > 1]
assert not twice, twice
"""

_CACHE_SPEC = """
from jaxlookahead.engine import Engine
options = dict(max_new_tokens=24, rows=2, plain_steps=2)
plain = decoding.generate(model, params, prompts, drafter=None, **options)
for spec in (P("data"), P("data", "model")):
    drafted = decoding.generate(model, sharded, prompts, cache_spec=spec, **options)
    assert all(first_difference(a, b) is None for a, b in zip(plain, drafted)), "tokens differ"
    run = Engine(model, sharded, rows=2, eos_size=1, stop_shape=(1, 1), cache_spec=spec)
    run.reserve(100)
    leaf = jax.tree.leaves(run._cache)[0]
    assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim), leaf.sharding
for spec, rows, said in ((P("data"), 3, "does not fit"), (P("nowhere"), 2, "nowhere"), ({"a": P()}, 2, "does not fit")):
    try:
        decoding.generate(model, sharded, prompts, rows=rows, cache_spec=spec)
    except ValueError as error:
        assert said in str(error), error
    else:
        raise AssertionError(spec)
"""

_STEP = """
calls = engine.compiled(model, "cpu", mesh)
cache, state = calls.allocate(2, 128), calls.start(2, 128, (1, 1, 1), False)
keys = cache["layer_0"]["k"]
assert keys.sharding.shard_shape(keys.shape) == (2, 1, *keys.shape[2:]), keys.sharding
packed = tree.pack([1, 2], [tree.draft_from_paths([[3, 4], [5]])] * 2, 4)
cache, state, _ = calls.step(sharded, cache, state, packed, None)
assert cache["layer_0"]["k"].sharding == keys.sharding
if kind == AxisType.Auto:
    program = Program.parse(calls.step.lower(sharded, cache, state, packed, None).compile().as_text())
    found = program.collectives()
    assert found and not [scope for _, scope in found if "/commit/" in scope], found
"""

_COMMIT = """
axes = caches.find_axes(model)
cache = model.init_cache(4, 64)
cache = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P("data"))), cache)
rows = NamedSharding(mesh, P("data"))
lengths, path = jax.device_put(np.array([3, 4, 5, 6]), rows), jax.device_put(np.zeros((4, 8), int), rows)

def commit(cache, lengths, path):
    return caches.commit(cache, axes, jnp.int32(56), lengths, path)

if kind == AxisType.Explicit:
    commit = jax.sharding.auto_axes(commit, out_sharding=P("data"))
with jax.set_mesh(mesh):
    text = jax.jit(commit, donate_argnums=0).lower(cache, lengths, path).compile().as_text()
found = [name for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute") if name + "(" in text]
assert not found, found
"""

_ON_DEVICE = """
from jaxlookahead.sampling import pack
tokens = np.zeros((4, 40), np.int32)
for row, prompt in zip(tokens, prompts):
    row[: len(prompt)] = prompt
lengths = np.array([len(prompt) for prompt in prompts])
call = functools.partial(on_device.generate, model, max_new_tokens=12)
wanted = jax.jit(call)(params, tokens, lengths)
if kind == AxisType.Explicit:
    call = jax.sharding.auto_axes(call, out_sharding=P())
with jax.set_mesh(mesh):
    got = jax.jit(call)(sharded, tokens, lengths)
assert (np.asarray(got.tokens) == np.asarray(wanted.tokens)).all()
"""


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    "script",
    [_SAME_TOKENS, _CACHE_SPEC, _STEP, _COMMIT, _ON_DEVICE],
    ids=["B28_same_tokens", "cache_spec", "cache_divided_by_heads", "no_collective_in_commit", "on_device"],
)
def test_eight_devices(script, kind):
    environment = {
        **os.environ,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", _COMMON + script, kind]
    root = Path(__file__).parents[1]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
