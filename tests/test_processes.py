"""Decoding in two processes that share a mesh, each with a trie of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxlookahead import generate
from jaxlookahead.drafters.protocol import Draft
from jaxlookahead.processes import Processes
from jaxlookahead.tree import pack, unpack

_SCRIPT = """
import sys
import jax

port, rank = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)

import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxlookahead import TrieDrafter, decoding
from jaxlookahead.models.dummy import tiny_decoder
from jaxlookahead.sampling import Sampling

mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
assert jax.process_count() == 2 and len({d.process_index for d in mesh.devices.flat}) == 2
model, params = tiny_decoder(vocab_size=48)

def place(x):
    axis = next(i for i in range(x.ndim) if x.shape[i] % 2 == 0)
    where = NamedSharding(mesh, P(*["model" if i == axis else None for i in range(x.ndim)]))
    host = np.asarray(x)
    return jax.make_array_from_callback(x.shape, where, lambda index: host[index])

sharded = jax.tree.map(place, params)
rng = np.random.default_rng(0)
prompts = [rng.integers(0, 48, n).tolist() for n in (9, 5)]
options = dict(max_new_tokens=16, width=4, sampling=[Sampling(), Sampling(temperature=1.0)])
plain = decoding.generate(model, params, prompts, drafter=None, **options)
steps = []

class Recorded(TrieDrafter):
    def draft(self, *arguments):
        found = super().draft(*arguments)
        steps.append((found.tokens, found.parents))
        return found

def same(found):
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)

drafter = Recorded()
for mode in ("check", "check", None):
    drafted = decoding.generate(model, sharded, prompts, drafter=drafter, processes=mode, **options)
    same(drafted)
assert drafted.stats.accepted > 10, drafted.stats
print("steps", steps)

other = TrieDrafter()
if rank == 1:
    other.insert([prompts[0][-1], 7, 8, 9])
else:
    other.insert([prompts[0][-1], *plain[0].tokens.tolist()])
try:
    decoding.generate(model, sharded, prompts, drafter=other, processes="check", **options)
except RuntimeError as error:
    print("error", error)
# By process 0's clock, or without a clock.
same(decoding.generate(model, sharded, prompts, drafter=other, processes="broadcast", **options))
found = decoding.generate(model, sharded, prompts, drafter=other, processes="broadcast", adapt=False, **options)
same(found)
print("broadcast", found.stats.drafted, found.stats.accepted, found.stats.histogram)
"""


def test_two_processes_draft_and_emit_the_same():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, str(port), str(rank)],
            env=environment,
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [run.communicate(timeout=600) for run in runs]
    finally:
        for run in runs:
            run.kill()
    said = []
    for run, (out, err) in zip(runs, outputs, strict=True):
        assert run.returncode == 0, err[-3000:]
        said.append([line for line in out.splitlines() if line.startswith(("steps", "error", "broadcast"))])
    assert said[0] == said[1]
    assert [line.split()[0] for line in said[0]] == ["steps", "error", "broadcast"]
    assert "the drafts of step 1 differ between processes" in said[0][1]
    assert int(said[0][2].split()[2]) > 10


def test_one_process_has_nothing_to_agree_on(tiny):
    packed, drafts = pack([3], [Draft()], 1), [Draft()]
    assert Processes("check", None).agree(packed, drafts, 4) == (packed, drafts)
    with pytest.raises(ValueError, match="processes must be one of None, 'check', 'broadcast', got 'all'"):
        generate(*tiny, [[1]], processes="all")


def test_unpack_undoes_pack():
    drafts = [Draft([5, 6, 7], [-1, 0, -1]), Draft(), Draft([4], [-1])]
    assert unpack(pack([1, 2, 3], drafts, 4)) == drafts
    np.testing.assert_array_equal(pack([1, 2, 3], unpack(pack([1, 2, 3], drafts, 4)), 4), pack([1, 2, 3], drafts, 4))
