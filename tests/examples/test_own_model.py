"""The example runs and says what its text promises."""

from __future__ import annotations

import runpy
from pathlib import Path


def test_own_model_runs_and_needs_fewer_steps(capsys):
    path = Path(__file__).parents[2] / "examples" / "own_model.py"
    runpy.run_path(str(path), run_name="__main__")
    *_, last = capsys.readouterr().out.strip().splitlines()
    drafted, plain = (int(word) for word in last.split() if word.isdigit())
    assert drafted < plain == 64
