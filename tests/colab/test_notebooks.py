from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from notebooks import COLAB, NAMES, cells, text


def read(name: str) -> str:
    return (COLAB / f"{name}.py").read_text("utf-8")


def test_there_are_these_notebooks():
    assert {path.stem for path in COLAB.glob("*.py")} == {path.stem for path in COLAB.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_in_step(name):
    found = (COLAB / f"{name}.ipynb").read_text("utf-8")
    assert found == text(read(name)), "run python tests/colab/notebooks.py"


@pytest.mark.parametrize("name", NAMES)
def test_colab_finds_what_it_needs(name):
    made = json.loads((COLAB / f"{name}.ipynb").read_text("utf-8"))
    assert made["metadata"]["accelerator"] == "TPU"
    kinds = [cell["cell_type"] for cell in made["cells"]]
    sources = ["".join(cell["source"]) for cell in made["cells"]]
    assert f"blob/main/colab/{name}.ipynb" in sources[0] and "colab-badge.svg" in sources[0]
    # One line installs, and it is the first that runs.
    assert sources[kinds.index("code")].startswith("%pip install -q ")
    assert sum("%pip" in source or "!pip" in source for source in sources) == 1
    assert all(not cell["outputs"] for cell in made["cells"] if cell["cell_type"] == "code")


@pytest.mark.parametrize("name", NAMES)
def test_runs_from_top_to_bottom_without_a_network(name, monkeypatch, capsys):
    def refuse(*arguments, **options):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    # Every width compiles: few of them.
    monkeypatch.setattr("jaxlookahead.requests.default_width", lambda platform: 2)
    space = {"__name__": "__main__"}
    for number, (kind, source) in enumerate(cells(read(name))):
        if kind == "code" and not source.startswith("%pip"):
            # Cell by cell, as a notebook would, and with the cell's number in tracebacks.
            exec(compile(source, f"{name}, cell {number}", "exec"), space)
    printed = capsys.readouterr().out
    assert "Warning: no TPU here" in printed or "tpu" in sys.modules["jax"].default_backend()
    assert "identical: False" not in printed
    if name == "your_own_model":
        assert "mask ignored" in printed and printed.count("[True, True]") == 8


def test_cells_are_told_apart():
    script = (
        "# ---\n# header\n# ---\n\n# %% [markdown]\n# # Title\n#\n# text\n\n"
        "# %%\n# %pip install -q x\n\n# %%\nx = 1\n# note\n"
    )
    assert cells(script) == [("markdown", "# Title\n\ntext"), ("code", "%pip install -q x"), ("code", "x = 1\n# note")]
