from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def test_learns_and_needs_fewer_calls():
    pytest.importorskip("optax")
    path = Path(__file__).parents[2] / "examples" / "grpo.py"
    spec = importlib.util.spec_from_file_location("grpo", path)
    grpo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(grpo)
    # Raises if drafted and plain rollouts differ.
    history = grpo.train(epochs=14, n=8)
    assert history[-1]["reward"] > 2 * history[0]["reward"]
    assert history[-1]["calls_per_token"] < 0.7 * history[0]["calls_per_token"]
    assert history[-1]["plain_calls_per_token"] == 1
