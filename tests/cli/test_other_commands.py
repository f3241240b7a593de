from __future__ import annotations

import dataclasses
import json

import pytest

from jaxlookahead.cli import demo, doctor
from jaxlookahead.cli.main import COMMANDS

TRACE = {"name": "a", "task": "t", "split": "test", "prompt": [1, 2, 3], "response": [1, 2, 3, 1, 2, 3, 1, 2]}


def test_every_command_has_help(cli):
    for name in COMMANDS:
        result = cli(name, "--help")
        assert result.code == 0 and result.out.startswith(f"usage: jaxlookahead {name}")
    assert cli("--version").code == 0


def test_replay_is_a_command(cli, tmp_path):
    file = tmp_path / "traces.jsonl"
    file.write_text(json.dumps(TRACE) + "\n")
    result = cli("replay", str(file), "--json")
    assert result.code == 0
    assert json.loads(result.out)["tasks"]["t"]["tokens"] == 7


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "cannot read traces"),
        ("", [], "holds no traces"),
        ("{", [], ":1"),
        (json.dumps(TRACE | {"split": "warm"}), [], "no rows with split 'test'"),
        (json.dumps(TRACE), ["--fill", "5"], "--fill"),
        (json.dumps(TRACE), ["--drafter", "nobody"], "unknown drafter"),
        (json.dumps(TRACE), ["--drafter", "prompt_lookup", "--mode", "tree"], "no modes"),
        (json.dumps(TRACE), ["--against", "trie"], "is the drafter itself"),
        (json.dumps(TRACE), ["--plot", "picture.xyz"], "ending"),
    ],
)
def test_replay_says_what_is_wrong(cli, complaint, tmp_path, content, options, message):
    file = tmp_path / "traces.jsonl"
    if content is not None:
        file.write_text(content)
    result = cli("replay", str(file), *options)
    assert result.code == 1
    assert message in complaint(result)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("nonsense", "is no JSON"), ("{}", "needs a field"), ("", "holds no prompt")],
)
def test_bench_says_what_is_wrong(cli, complaint, tmp_path, content, message):
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    result = cli("bench", str(file))
    assert result.code == 1
    assert message in complaint(result)


def test_demo_compares(cli, monkeypatch):
    monkeypatch.setattr(demo, "PROMPTS", (("letters", "abcabc", 8),))
    result = cli("demo", "--width", "2", "--json")
    assert result.code == 0
    letters, total = map(json.loads, result.out.splitlines())
    assert letters["identical"] and letters["tokens"] == total["tokens"] == 8


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(doctor, "_MODEL", {})
    monkeypatch.setattr(doctor, "_TOKENS", 8)
    monkeypatch.setattr(doctor, "_WIDTH", 4)


def test_doctor(cli, small):
    result = cli("doctor", "--json", "--model", "tiny")
    assert result.code == 0
    report = json.loads(result.out)
    assert report["versions"]["jax"] and report["devices"]["devices"]
    assert report["dtypes"] == {"float32": "yes", "bfloat16": "yes", "float16": "yes"}
    assert report["lossless"]["identical"] and report["lossless"]["known_text_speedup"] > 0
    assert report["model"]["passed"] and report["model"]["tree"] <= report["model"]["tolerance"]


@dataclasses.dataclass(frozen=True)
class MaskIgnored:
    """A model that attends to everything."""

    inner: object

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def forward(self, params, tokens, positions, mask, cache, start):
        return self.inner.forward(params, tokens, positions, mask | True, cache, start)


def test_doctor_finds_a_broken_model(cli, monkeypatch, loaded):
    monkeypatch.setattr(doctor, "lossless", lambda: {"identical": True})
    cli.loaded = dataclasses.replace(loaded, model=MaskIgnored(loaded.model))
    result = cli("doctor", "--model", "broken")
    assert result.code == 1 and "something is wrong" in result.err
    assert "passed               NO" in result.out and "mask ignored" in result.out


def test_doctor_finds_lost_tokens(cli, monkeypatch):
    monkeypatch.setattr(doctor, "lossless", lambda: {"identical": False, "margin": 2.0})
    assert cli("doctor").code == 1


def test_doctor_says_what_is_wrong(cli, complaint, monkeypatch):
    monkeypatch.setattr(doctor, "lossless", lambda: {"identical": True})
    result = cli("doctor", "--dtype", "float32")
    assert result.code == 2 and "--model" in complaint(result)
    cli.loaded = FileNotFoundError("source='x' does not exist")
    cli_result = cli("doctor", "--model", "x", "--json")
    assert cli_result.code == 1 and "does not exist" in complaint(cli_result)
