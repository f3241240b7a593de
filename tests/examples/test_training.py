"""The examples that train run, and show what they promise: they raise where drafted and plain tokens differ."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def quick(name: str, monkeypatch, capsys, tmp_path) -> list[list[float]]:
    """Runs an example with `--quick`; returns the numbers in each row of its table."""
    pytest.importorskip("optax")
    monkeypatch.setattr(sys, "argv", [name, "--quick", "--plot", str(tmp_path / "plot.png")])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    return [[float(x) for x in re.findall(r"│ +(\d+(?:\.\d+)?) +(?=│)", row)] for row in rows]


def test_eval_needs_fewer_calls_from_one_to_the_next(monkeypatch, capsys, tmp_path):
    rows = quick("eval.py", monkeypatch, capsys, tmp_path)
    _, losses, _, drafted, plain = zip(*rows, strict=True)
    assert losses[-1] < 0.7 * losses[0]
    assert drafted[-1] < 0.8 * drafted[0]
    assert set(plain) == {1.0}


def test_t5_decodes_with_drafts_from_its_input(monkeypatch, capsys, tmp_path):
    rows = quick("train_t5.py", monkeypatch, capsys, tmp_path)
    assert len(rows) == 2
    for row in rows:
        *_, plain, drafted = row
        assert drafted < plain == 1
