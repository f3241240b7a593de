from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import sys

import pytest

import jaxlookahead
from jaxlookahead.drafters import persistence

SHORT = ("--max-new-tokens", "12", "--width", "4", "--rows", "2")


def rows(result):
    return [json.loads(line) for line in result.out.splitlines()]


def test_prints_the_response(cli):
    result = cli("generate", "hello", *SHORT)
    assert result.code == 0
    assert "12 tokens" in result.err
    plain = cli("generate", "hello", "--plain", *SHORT)
    assert plain.out == result.out and len(plain.out.rstrip("\n")) <= 12


def test_json_rows_and_prompt_files(cli, tmp_path):
    file = tmp_path / "prompts"
    file.write_text('one\n\n{"text": "two"}\n')
    result = cli("generate", "zero", "--file", str(file), "--json", "--raw", *SHORT)
    assert result.code == 0
    assert [row["prompt"] for row in rows(result)] == ["zero", "one", "two"]
    assert all(len(row["tokens"]) == len(row["from_draft"]) == 12 for row in rows(result))


def test_standard_input(cli, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert [row["prompt"] for row in rows(cli("generate", "--file", "-", "--json", *SHORT))] == ["hello"]


def test_streams_the_same_tokens(cli):
    whole = cli("generate", "a a a a", "b", *SHORT)
    streamed = cli("generate", "a a a a", "b", "--stream", *SHORT)
    assert streamed.code == 0
    assert streamed.out == whole.out
    assert re.findall(r"─ (.*?) ─", whole.out) == ["a a a a", "b"]
    chunks = rows(cli("generate", "a a a a", "b", "--stream", "--json", *SHORT))
    for prompt, row in zip(("a a a a", "b"), rows(cli("generate", "a a a a", "b", "--json", *SHORT)), strict=True):
        mine = [chunk for chunk in chunks if chunk["prompt"] == prompt]
        assert [token for chunk in mine for token in chunk["tokens"]] == row["tokens"]
        assert [chunk["finish_reason"] for chunk in mine] == [None] * (len(mine) - 1) + ["length"]


def test_samples(cli):
    options = ("--temperature", "1", "--top-p", "0.9", "--top-k", "20", "--seed", "3", "--samples", "2", "--json")
    first = rows(cli("generate", "hello", "you", *options, *SHORT))
    assert [(row["prompt"], row["sample"]) for row in first] == [("hello", 0), ("hello", 1), ("you", 0), ("you", 1)]
    assert first[0]["tokens"] != first[1]["tokens"]
    plain = rows(cli("generate", "hello", "you", "--plain", *options, *SHORT))
    assert [row["tokens"] for row in plain] == [row["tokens"] for row in first]


def test_memory_is_kept_in_a_file(cli, tmp_path):
    file = str(tmp_path / "memory")
    options = ("generate", "hello", "--json", "--width", "4", "--no-adapt", "--max-new-tokens", "12")
    first = rows(cli(*options, "--memory", file, "--save-memory", file))[0]
    second = rows(cli(*options, "--memory", file))[0]
    assert second["tokens"] == first["tokens"]
    assert second["accepted"] > first["accepted"]


def test_memory_of_another_tokenizer_is_refused(cli, tmp_path, complaint, loaded):
    from jaxlookahead.models.dummy_tokenizer import TinyTokenizer

    class Other(TinyTokenizer):
        def get_vocab(self):
            return {f"x{i}": i for i in range(96)}

    file = str(tmp_path / "memory")
    assert cli("generate", "hello", "--save-memory", file, *SHORT).code == 0
    cli.loaded = dataclasses.replace(loaded, tokenizer=Other())
    result = cli("generate", "hello", "--memory", file, *SHORT)
    assert result.code == 1
    assert "another tokenizer" in complaint(result)


def test_ctrl_c_leaves_the_memory_file_whole(cli, tmp_path, monkeypatch):
    file = tmp_path / "memory"
    assert cli("generate", "hello", "--save-memory", str(file), *SHORT).code == 0
    before = file.read_bytes()

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(persistence.os, "replace", interrupted)
        result = cli("generate", "other", "--memory", str(file), "--save-memory", str(file), *SHORT)
    assert result.code == 130 and result.err.endswith("interrupted\n")
    with monkeypatch.context() as patch:
        # In the middle of decoding.
        patch.setattr(jaxlookahead.TrieDrafter, "verified", lambda *arguments: signal.raise_signal(signal.SIGINT))
        assert cli("generate", "other", "--memory", str(file), "--save-memory", str(file), *SHORT).code == 130
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["memory"]


USAGE = [
    (["generate", "x", "--samples", "2"], "--samples has no effect"),
    (["generate", "x", "--top-p", "0.5"], "--top-p has no effect"),
    (["generate", "x", "--temperature", "-1"], "temperature"),
    (["generate", "x", "--temperature", "nan"], "temperature"),
    (["generate", "x", "--temperature", "1", "--top-p", "2"], "top_p"),
    (["generate", "x", "--temperature", "1", "--seed", "-1"], "seed"),
    (["generate", "x", "--memory", "nothing-here"], "no such file"),
    (["generate", "x", "--save-memory", "no-such-folder/file"], "is no directory"),
    (["generate", "x", "--save-memory", "."], "is a directory"),
    (["generate", "x", "--save-memory", "/proc/nobody-can-write-here"], "can't be written"),
    (["generate", "x", "--memory", "."], "is a directory"),
    (["generate", "x", "--save-memory", "m", "--plain"], "need the drafter `trie`"),
    (["generate", "x", "--save-memory", "m", "--drafter", "prompt_lookup"], "need the drafter `trie`"),
]


@pytest.mark.parametrize(("argv", "message"), USAGE)
def test_options_without_meaning(cli, complaint, argv, message):
    result = cli(*argv)
    assert result.code == 2
    assert message in complaint(result)


PARSER = [
    ["generate", "x", "--no-such-option"],
    ["generate", "x", "--max-new-tokens", "0"],
    ["generate", "x", "--rows", "many"],
    ["generate", "x", "--drafter", "unknown"],
    ["generate", "x", "--seed", "1.5", "--temperature", "1"],
    ["no-such-command"],
    [],
]


@pytest.mark.parametrize("argv", PARSER)
def test_wrong_usage(cli, argv):
    result = cli(*argv)
    assert result.code == 2
    assert result.err.startswith("usage: ") and "error: " in result.err.splitlines()[-1]


FILES = [
    (None, "nothing-here: No such file"),
    (b"\xff\xfe", "no UTF-8"),
    (b"\n \n", "no prompt"),
    (b'{"no": "text"}\n', "line 1"),
    (b'ok\n{"text": 5}\n', "line 2"),
    (b"{" * 5000, "line 1"),
    (b'{"text": ""}', "has no tokens"),
]


@pytest.mark.parametrize(("content", "message"), FILES)
def test_prompt_files_that_cannot_be_used(cli, complaint, tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "nothing-here").write_bytes(content)
    result = cli("generate", "--file", "nothing-here", "--raw", *SHORT)
    assert result.code == 1
    assert message in complaint(result)


def test_directories_are_no_prompt_files(cli, complaint, tmp_path):
    result = cli("generate", "--file", str(tmp_path), *SHORT)
    assert result.code == 1 and "directory" in complaint(result)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the checkpoint\nis damaged"),
        FileNotFoundError("source='x' does not exist"),
        RuntimeError("no network"),
        ImportError("no module"),
        PermissionError(13, "Permission denied", "model.gguf"),
        ValueError(),
    ],
)
def test_models_that_cannot_be_loaded(cli, complaint, error):
    cli.loaded = error
    result = cli("generate", "x")
    assert result.code == 1
    assert complaint(result).startswith("jaxlookahead generate: ") and len(complaint(result)) > 24


def test_ctrl_c(cli, complaint):
    cli.loaded = KeyboardInterrupt()
    result = cli("generate", "x")
    assert result.code == 130 and complaint(result) == "interrupted"


def test_faults_of_ours_keep_their_traceback(cli):
    cli.loaded = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        cli("generate", "x")
    cli.loaded = ValueError("wrong")
    with pytest.raises(ValueError, match="wrong"):
        cli("generate", "x", "--traceback")


def test_models_without_a_tokenizer_or_template(cli, complaint, loaded):
    class NoTemplate(type(loaded.tokenizer)):
        chat_template = None

    cli.loaded = dataclasses.replace(loaded, tokenizer=NoTemplate())
    result = cli("generate", "x")
    assert result.code == 1 and "--raw" in complaint(result)
    cli.loaded = dataclasses.replace(loaded, tokenizer=None)
    result = cli("generate", "x")
    assert result.code == 1 and "no tokenizer" in complaint(result)


def test_damaged_memory(cli, complaint, tmp_path):
    file = tmp_path / "memory"
    file.write_bytes(b"not a trie")
    result = cli("generate", "x", "--memory", str(file), *SHORT)
    assert result.code == 1 and "is not a jaxlookahead trie file" in complaint(result)


def test_prompts_that_are_too_long(cli, complaint):
    result = cli("generate", "x" * 600, "--raw", *SHORT)
    assert result.code == 1 and "512" in complaint(result)


def test_a_stop_text_without_tokens(cli, complaint):
    result = cli("generate", "x", "--stop", "", *SHORT)
    assert result.code == 1 and "stop[0]" in complaint(result)


def test_a_model_that_gives_nan(cli, complaint, loaded):
    import jax

    cli.loaded = dataclasses.replace(loaded, params=jax.tree.map(lambda x: x * float("nan"), loaded.params))
    result = cli("generate", "x", *SHORT)
    assert result.code == 1 and "NaN" in complaint(result)


def test_the_token_that_ends_a_response_is_not_printed(cli, loaded):
    (row,) = rows(cli("generate", "hello", "--json", *SHORT))
    end = row["tokens"][5]
    first = row["tokens"].index(end)
    cli.loaded = dataclasses.replace(loaded, eos_ids=(end,))
    (ended,) = rows(cli("generate", "hello", "--json", *SHORT))
    assert ended["tokens"] == row["tokens"][: first + 1] and ended["finish_reason"] == "eos"
    expected = loaded.tokenizer.decode(row["tokens"][:first])
    for options in ((), ("--stream",)):
        assert cli("generate", "hello", *options, *SHORT).out == expected + "\n"


def test_a_prompt_that_is_a_file_is_told(cli, tmp_path):
    file = tmp_path / "prompts"
    file.write_text("one")
    assert f"use --file {file}" in cli("generate", str(file), *SHORT).err
