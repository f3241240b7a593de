"""README.md and BUILD.md: their code runs, their commands parse, their names exist."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import jaxlookahead as jl
from jaxlookahead.cli.main import build_parser
from jaxlookahead.models.dummy import tiny_decoder
from jaxlookahead.models.dummy_tokenizer import TinyTokenizer

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "BUILD.md")}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(name: str) -> list[str]:
    return [code for language, code in FENCE.findall(TEXTS[name]) if language == "python"]


def run_all(name: str) -> None:
    """Runs a document's blocks as a reader would: one after the other in one interpreter."""
    namespace: dict[str, object] = {"__name__": "document"}
    for number, code in enumerate(blocks(name), 1):
        exec(compile(code, f"{name}, block {number}", "exec"), namespace)


def commands() -> list[list[str]]:
    """Every command of an indented line, of a shell block or in backticks, as words, without placeholders."""
    found = []
    for text in TEXTS.values():
        shell = "".join(code for language, code in FENCE.findall(text) if language != "python")
        text = FENCE.sub("", text)
        lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE) + shell.splitlines()
        lines += re.findall(r"`([^`]+)`", re.sub(r"^    .*$", "", text, flags=re.MULTILINE))
        for command in [part for line in lines for part in line.split("&&")]:
            # "[--option]" may be left out, "N" stands for a number.
            words = shlex.split(command.replace("[", " ").replace("]", " "), comments=True)
            if words[:1] == ["jaxlookahead"] or words[:2] == ["python", "-m"] or words[:1] == ["python"]:
                found.append(["4" if word in ("N", "TOKENS") else word for word in words])
    return found


def test_blocks_run_on_a_small_model(monkeypatch, capsys):
    def load(source: str) -> tuple:
        assert source == "smollm2-135m-instruct"
        return *tiny_decoder(), TinyTokenizer()

    monkeypatch.setattr("jaxlookahead.checkpoints.load.load", load)
    assert blocks("README.md")
    run_all("README.md")
    run_all("BUILD.md")
    # The number of tokens per call of the first block, two samples of the second.
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.real
def test_blocks_run_on_the_real_model(capsys):
    run_all("README.md")
    assert "return" in capsys.readouterr().out


def test_commands_parse():
    parser = build_parser()
    ours = [words[1:] for words in commands() if words[0] == "jaxlookahead" and len(words) > 1]
    assert {words[0] for words in ours} >= {"demo", "generate", "bench", "replay", "doctor"}
    for words in ours:
        parser.parse_args(words)


def test_scripts_exist_with_their_options():
    scripts = [words for words in commands() if words[0] == "python"]
    assert scripts
    for words in scripts:
        if words[1] == "-m":
            spec = importlib.util.find_spec(words[2])
            assert spec is not None and spec.origin is not None, words
            source = Path(spec.origin).read_text(encoding="utf-8")
        else:
            source = (ROOT / words[1]).read_text(encoding="utf-8")
        assert '__name__ == "__main__"' in source, words
        for option in [word for word in words if word.startswith("--")]:
            assert f'"{option}"' in source, f"{words} has no option {option}"


def resolve(name: str) -> None:
    """Looks up a dotted name of the package; unlike `pkgutil.resolve_name` it tells which import failed."""
    found: Any = jl
    path = "jaxlookahead"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if not hasattr(found, part) and inspect.ismodule(found) and hasattr(found, "__path__"):
            importlib.import_module(path)
        found = getattr(found, part)


def test_names_and_files_exist():
    missing = []
    for text in TEXTS.values():
        text = FENCE.sub("", text)
        for name in re.findall(r"`(?:jl|jaxlookahead)((?:\.\w+)+)(?:\([^`]*\))?`", text):
            try:
                resolve(name)
            except (ImportError, AttributeError) as error:
                # A module of an adapter can't be imported without the package that it adapts.
                if not isinstance(error, ModuleNotFoundError) or (error.name or "").startswith("jaxlookahead"):
                    missing.append(f"{name}: {error}")
        for file in re.findall(r"`((?:examples|tests|colab|models)/[\w/]+\.py)`", text):
            if not (ROOT / file).exists() and not (ROOT / "jaxlookahead" / file).exists():
                missing.append(file)
    assert not missing
    assert jl.__all__ == sorted(jl.__all__)
