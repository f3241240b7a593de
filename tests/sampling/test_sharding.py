"""Decisions on several devices equal those on one. A process of its own sees four CPU devices."""

import os
import pathlib
import subprocess
import sys

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxlookahead.sampling import Sampling, advance, decide, init_context, pack

V, B, L = 64, 4, 16
full = Sampling(temperature=0.7, top_p=0.9, top_k=20, seed=3, repetition_penalty=1.3, no_repeat_ngram=3,
                banned_sequences=((1, 2, 3),), forced_tokens={1: 5}, logit_bias={3: 2.0}, min_new_tokens=9)
samplings = [Sampling(), full, Sampling(temperature=1.0), Sampling(presence_penalty=1.0)]
arrays = pack(samplings, requests=range(B), vocab_size=V, eos_ids=[2])
rng = np.random.default_rng(0)
history = rng.integers(0, 8, (B, L)).astype(np.int32)
prompt_length, length = np.full(B, 4, np.int32), np.full(B, 6, np.int32)
logits = rng.normal(size=(B, V)).astype(np.float32) * 2

def run(arrays, history, prompt_length, length, logits):
    def body(carry):
        context, tokens, i = carry
        token = decide(arrays, context, logits + i).token
        return advance(context, token, token >= 0), tokens.at[i].set(token), i + 1
    start = init_context(arrays, history, prompt_length, length), jnp.zeros((4, B), jnp.int32), 0
    return jax.lax.while_loop(lambda carry: carry[2] < 4, body, start)[1]

want = np.asarray(jax.jit(run)(arrays, history, prompt_length, length, logits))
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("rows", "vocabulary"), axis_types=(kind,) * 2)
    def place(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))
    rows = [jax.tree.map(lambda x: place(x, "rows"), x) for x in (arrays, history, prompt_length, length)]
    for spec in (("rows",), (None, "vocabulary")):
        with jax.set_mesh(mesh):
            call = run
            if kind == AxisType.Explicit:
                call = jax.sharding.auto_axes(run, out_sharding=P(None, "rows"))
            got = jax.jit(call)(*rows, place(logits, *spec))
        np.testing.assert_array_equal(np.asarray(got), want)
        print("equal")
"""


def test_B28_sharded_rows_and_vocabulary_decide_the_same():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    root = pathlib.Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["equal"] * 4
