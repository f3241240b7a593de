from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from jaxlookahead.bench import aot
from jaxlookahead.bench.shapes import CONFIGS, abstract_model


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-3-8b", 8.03e9), ("qwen3-4b", 4.02e9), ("gemma-3-4b", 3.88e9), ("smollm2-135m", 1.345e8)],
)
def test_shapes_are_those_of_the_published_models(name, parameters):
    model, params = abstract_model(name)
    sizes = [x.size for x in aot.jax.tree.leaves(params)]
    assert sum(sizes) == pytest.approx(parameters, rel=0.005)
    assert model.vocab_size == CONFIGS[name]["vocab_size"]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(("topology", "devices"), [("v5e:2x2", 1), ("v6e:2x2", 1), ("v5e:2x4", 8)])
def test_step_for_tpu_reads_no_more_when_wide_and_leaves_the_cache_in_place(topology, devices):
    command = ["aot", "--topology", topology, "--models", "llama-3-8b", "--layers", "1", "--widths", "1,32", "--json"]
    if devices == 1:
        command[4] = "llama-3-8b,smollm2-135m"
    result = subprocess.run(
        [sys.executable, "-m", "jaxlookahead", *command, "--devices", str(devices)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(found) == (2 if devices > 1 else 4)
    for narrow, wide in zip(found[::2], found[1::2], strict=True):
        assert wide["bytes"] <= 1.15 * narrow["bytes"]
        assert wide["cache_aliased"] and narrow["cache_aliased"]
        assert not [name for name in wide["collectives"] if name.endswith("in commit")]
