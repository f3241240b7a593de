from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import jax
import pytest

from jaxlookahead.bench import aot, peers
from jaxlookahead.bench.peers import Response
from jaxlookahead.cli import bench, demo, doctor
from jaxlookahead.cli.main import COMMANDS
from jaxlookahead.decoding import generate

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
    ("options", "message"),
    [
        (["--models", "gpt-5"], "no shapes of a model 'gpt-5'"),
        (["--devices", "3"], "devices must be 1 to 2"),
        ([], 'pip install "jax[tpu]"'),
    ],
)
def test_aot_says_what_is_wrong(cli, complaint, monkeypatch, options, message):
    if options:
        monkeypatch.setattr(aot, "topology_devices", lambda topology: jax.devices() * 2)
    else:
        monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        monkeypatch.setenv(name, "")
    result = cli("aot", *options)
    assert result.code == 1 and message in complaint(result)


def _prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    rows = [{"name": f"{i}", "task": "t", "prompt": [1, 2, 3, 1, 2, i], "max_new_tokens": 4} for i in range(2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_bench_compares_with_peers(cli, tmp_path, monkeypatch):
    def make(name, loaded):
        def decode(prompt, max_new_tokens):
            output = generate(*list(loaded)[:2], [prompt], max_new_tokens=max_new_tokens, drafter=None)[0]
            tokens = output.tokens.tolist()
            return Response(len(tokens), [*tokens[:-1], (tokens[-1] + (prompt[-1] == 1)) % loaded.model.vocab_size])

        return {name: decode, "silent": lambda prompt, limit: Response(limit, None)}

    monkeypatch.setattr(bench, "make_peers", make)
    result = cli("bench", _prompts(tmp_path), "--against", "xllamacpp", "--json", "--drafter", "prompt_lookup")
    assert result.code == 0, result.err
    rows = {row["method"]: row for row in map(json.loads, result.out.splitlines()) if row["task"] == "t"}
    assert {name: row["tokens"] for name, row in rows.items()} == dict.fromkeys(rows, 8) and len(rows) == 4
    # The peer's second response was made to differ; one that tells no tokens can't.
    assert [row["different"] for row in rows.values()] == [0, 0, 1, 0]
    assert "tokens_per_call" not in rows["silent"] and rows["plain"]["tokens_per_call"] == 1
    plain = rows["plain"]
    shares = sum(plain[f"{name}_share"] for name in ("prefill", "draft", "step", "other"))
    assert shares == pytest.approx(1) and plain["wait_share"] < plain["step_share"]
    assert plain["peak_memory_bytes"] > 1e7


def test_bench_tries_every_drafter_and_number_of_rows(cli, tmp_path):
    result = cli("bench", _prompts(tmp_path), "--rows", "1,2", "--drafter", "trie", "--drafter", "prompt_lookup")
    assert result.code == 0, result.err
    lines = [line for line in result.out.splitlines() if "trie, cold" in line or "prompt_lookup, cold" in line]
    assert len(lines) == 8 and "rows" in result.out


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--against", "xllamacpp"], 1, "needs xllamacpp: pip install xllamacpp"),
        (["--against", "xllamacpp", "--rows", "2"], 2, "one prompt at a time"),
        (["--against", "transformers", "--temperature", "1"], 2, "one prompt at a time"),
        (["--top-p", "0.5"], 2, "--top-p has no effect"),
    ],
)
def test_bench_says_which_options_do_not_go(cli, complaint, tmp_path, monkeypatch, options, code, message):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    result = cli("bench", _prompts(tmp_path), *options)
    assert result.code == code and message in complaint(result)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("nonsense", "prompts.jsonl, line 1 is no JSON"),
        ("[" * 5000, "line 1 is no JSON"),
        (b"\xff\xfe", "prompts.jsonl is no UTF-8 text"),
        ("{}", "needs a field"),
        ('["text"]', "needs a field"),
        ("", "holds no prompt"),
        ('{"text": "a", "split": "warm"}', "holds no prompt"),
        ('{"text": 5}', "line 1: field `text` must be a string, got 5"),
        ('\n{"text": "a", "task": ["t"]}', "line 2: field `task` must be a string"),
        ('{"text": "a", "name": null}', "field `name` must be a string, got null"),
        ('{"text": "a", "max_new_tokens": "8"}', "field `max_new_tokens` must be an integer of at least 1"),
        ('{"text": "a", "max_new_tokens": true}', "field `max_new_tokens`"),
        ('{"prompt": "text"}', "field `prompt` must be a list of token ids"),
        ('{"prompt": []}', "field `prompt`"),
        ('{"prompt": [1, 2.5]}', "field `prompt`"),
        ('{"prompt": [-1]}', "field `prompt`"),
        ('{"prompt": [1], "response": 7}', "field `response` must be a list of token ids, got 7"),
        ('{"prompt": [1], "response": [null]}', "field `response`"),
        ('{"prompt": [96]}', "line 1: the prompt holds token id 96, but the model's vocabulary has 96 ids"),
    ],
)
def test_bench_says_what_is_wrong(cli, complaint, tmp_path, content, message):
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = cli("bench", str(file))
    assert result.code == 1
    assert message in complaint(result)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--plot", "picture.xyz"], 1, "ending must be one of"),
        (["--plot", "no-such-folder/picture.png"], 1, "can't write"),
        (["--temperature", "-1"], 2, "Sampling.temperature = -1"),
        (["--temperature", "nan"], 2, "Sampling.temperature"),
        (["--memory", "warm", "--drafter", "prompt_lookup"], 2, "--memory warm needs"),
        (["--tasks", "t,u"], 1, "--tasks names ['u']"),
    ],
)
def test_bench_complains_before_it_loads_the_model(cli, complaint, tmp_path, monkeypatch, options, code, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "a", "task": "t"}')
    cli.loaded = AssertionError()
    monkeypatch.chdir(tmp_path)
    result = cli("bench", str(file), *options)
    assert result.code == code and message in complaint(result)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_doctor_complains_about_a_model_first(cli, complaint, monkeypatch):
    monkeypatch.setattr(doctor, "lossless", lambda: pytest.fail("ran"))
    cli.loaded = ValueError("no checkpoint")
    result = cli("doctor", "--model", "x")
    assert result.code == 1 and result.out == "" and "no checkpoint" in complaint(result)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_output_that_nobody_takes(tmp_path):
    file = tmp_path / "traces.jsonl"
    file.write_text(json.dumps(TRACE) + "\n")
    command = f"exec '{sys.executable}' -m jaxlookahead replay '{file}'"

    def run(redirection: str) -> tuple[int, str]:
        # A pipe whose reader has gone before the first line.
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            ["sh", "-c", f"{command} {redirection}"], stdout=writer, stderr=subprocess.PIPE, text=True
        )
        os.close(writer)
        return done.returncode, done.stderr

    assert run("") == (1, "")
    assert run(">&-") == (1, "jaxlookahead replay: standard output is closed\n")
    if os.path.exists("/dev/full"):
        assert run("> /dev/full") == (1, "jaxlookahead replay: output: No space left on device\n")


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
