"""Percent scripts as notebooks: `python tests/colab/notebooks.py` writes `colab/*.ipynb` from `colab/*.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COLAB = Path(__file__).resolve().parents[2] / "colab"
NAMES = ("quickstart", "your_own_model", "rollouts", "benchmark")


def cells(script: str) -> list[tuple[str, str]]:
    """Kind (`code` or `markdown`) and source of each cell of a percent script, its header left out."""
    found: list[tuple[str, list[str]]] = []
    for line in script.splitlines():
        if line == "# %%" or line.startswith("# %% "):
            found.append(("markdown" if line.endswith("[markdown]") else "code", []))
        elif found:
            found[-1][1].append(line)
    out = []
    for kind, lines in found:
        while lines and not lines[-1]:
            lines.pop()
        if kind == "markdown":
            lines = [line.removeprefix("# ") if line != "#" else "" for line in lines]
        else:
            lines = [line.removeprefix("# ") if line.startswith("# %pip ") else line for line in lines]
        out.append((kind, "\n".join(lines)))
    return out


def notebook(script: str) -> dict[str, Any]:
    """The notebook of a percent script, in nbformat 4.5."""
    made = []
    for number, (kind, source) in enumerate(cells(script)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        cell["source"] = source.splitlines(keepends=True)
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        made.append(cell)
    metadata = {
        "accelerator": "TPU",
        "colab": {"provenance": []},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def text(script: str) -> str:
    """The notebook file of a percent script."""
    return json.dumps(notebook(script), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name in NAMES:
        (COLAB / f"{name}.ipynb").write_text(text((COLAB / f"{name}.py").read_text("utf-8")), "utf-8")
