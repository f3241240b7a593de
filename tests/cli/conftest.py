from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxlookahead.cli import common
from jaxlookahead.cli.main import main
from jaxlookahead.models.dummy import tiny_decoder
from jaxlookahead.models.dummy_tokenizer import TinyTokenizer


@dataclasses.dataclass
class Result:
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def loaded():
    from jaxlookahead.checkpoints.load import Loaded

    model, params = tiny_decoder()
    return Loaded(model, params, TinyTokenizer(), (), {}, None)  # type: ignore[arg-type]


@pytest.fixture
def cli(monkeypatch, capsys, loaded):
    """Runs a command in this process; `cli.loaded` is what `--model` gives, or an error that it raises."""

    class Runner:
        def __init__(self) -> None:
            self.loaded: Any = loaded

        def load(self, source, **options):
            if isinstance(self.loaded, BaseException):
                raise self.loaded
            return self.loaded

        def __call__(self, *argv: str) -> Result:
            try:
                code = main(list(argv))
            except SystemExit as stop:
                code = stop.code
            captured = capsys.readouterr()
            assert "Traceback" not in captured.err
            return Result(code, captured.out, captured.err)

    runner = Runner()
    monkeypatch.setattr(common, "load", runner.load)
    return runner


@pytest.fixture
def complaint():
    """The one line on stderr that tells what was wrong, after the lines that tell progress."""

    def read(result: Result) -> str:
        lines = [line for line in result.err.splitlines() if not line.startswith("loading ")]
        assert len(lines) == 1, result.err
        return lines[0]

    return read
