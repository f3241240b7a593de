"""Odd arguments and damaged files: nothing but the documented exceptions, and nothing lost.

`JAXLOOKAHEAD_FUZZ=N` tries N times as many examples, other ones in every run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import jaxlookahead as jl
from jaxlookahead import tree
from jaxlookahead.drafters.stored_index import TrieFileError
from jaxlookahead.replay.traces import TraceError, read_traces
from jaxlookahead.sampling.params import Sampling

GOLDEN = Path(__file__).parent / "golden"


TIMES = int(os.environ.get("JAXLOOKAHEAD_FUZZ", "1"))


def fuzz(examples: int):
    """The same examples in every run, but for long ones."""
    return hypothesis.settings(
        max_examples=examples * TIMES,
        derandomize=TIMES == 1,
        print_blob=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 60),
    st.sampled_from([2**31, -(2**31), 2**63, 2**64, 10**30]),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
ODD = st.recursive(
    ATOMS | st.builds(np.array, st.lists(st.integers(-3, 60), max_size=3)) | st.just(object()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
PROMPT = st.lists(st.integers(0, 49), min_size=1, max_size=4)


def mostly(good: st.SearchStrategy) -> st.SearchStrategy:
    """Good values more often than odd ones: with one odd argument among many, all the checks are reached."""
    return st.one_of(good, good, good, ODD)


ARGUMENTS = {
    "max_new_tokens": mostly(st.integers(0, 3)),
    "drafter": mostly(st.sampled_from(["trie", "prompt_lookup", None])),
    "namespaces": mostly(st.sampled_from([None, "a", ("b", 1)])),
    "request_ids": mostly(st.none()),
}
MORE_ARGUMENTS = ARGUMENTS | {
    "width": mostly(st.sampled_from([None, 1, 2])),
    "eos_ids": mostly(st.just([1])),
    "stop": mostly(st.just([[2, 3]])),
    "rows": mostly(st.just(2)),
    "sampling": mostly(st.sampled_from([None, Sampling(temperature=1.0)])),
    "processors": mostly(st.just(())),
    "constraint": mostly(st.none()),
}


@fuzz(60)
@hypothesis.given(mostly(st.lists(mostly(PROMPT), max_size=2)), st.fixed_dictionaries({}, optional=ARGUMENTS))
def test_generate_with_odd_arguments(tiny, prompts, arguments):
    try:
        result = jl.generate(*tiny, prompts, width=2, rows=1, **arguments)
    except (TypeError, ValueError):
        return
    for output in result:
        limit = arguments.get("max_new_tokens", 128)
        assert len(output.tokens) == (limit if isinstance(limit, int) else limit[output.request])
        assert output.finish_reason == "length"


@fuzz(150)
@hypothesis.given(mostly(st.lists(PROMPT, max_size=2)), st.fixed_dictionaries({}, optional=MORE_ARGUMENTS))
def test_arguments_are_checked_at_the_call(tiny, prompts, arguments):
    try:
        jl.stream(*tiny, prompts, **arguments).close()
    except (TypeError, ValueError) as error:
        assert str(error)


@fuzz(300)
@hypothesis.given(
    st.fixed_dictionaries({}, optional={name: ODD for name in Sampling.__dataclass_fields__}),
)
def test_sampling_settings(fields):
    try:
        settings = Sampling(**fields)
    except ValueError as error:
        assert "Sampling." in str(error)
        return
    hash(settings)


INTEGERS = st.one_of(st.integers(-3, 12), st.sampled_from([2**31, 2**63, -(2**70)]), st.integers(0, 9).map(np.int64))


@fuzz(200)
@hypothesis.given(
    st.lists(INTEGERS, max_size=10),
    st.lists(INTEGERS, max_size=10),
    st.none() | st.lists(st.floats(), max_size=10),
    st.none() | st.lists(st.text(max_size=2), max_size=10),
    st.integers(0, 8),
    st.integers(0, 5),
)
def test_any_draft_becomes_safe(tokens, parents, probs, sources, budget, max_depth):
    draft = jl.Draft(tokens=tokens, parents=parents, probs=probs, sources=sources)
    try:
        safe = tree.normalize(draft, budget=budget, max_depth=max_depth, vocab_size=10)
    except ValueError as error:
        assert "differ in length" in str(error)
        return
    assert len(safe) <= budget and all(0 <= token < 10 for token in safe.tokens)
    depths: list[int] = []
    for i, parent in enumerate(safe.parents):
        assert -1 <= parent < i
        depths.append(1 if parent < 0 else depths[parent] + 1)
    assert max(depths, default=0) <= max_depth
    assert len(set(zip(safe.parents, safe.tokens, strict=True))) == len(safe)
    tree.pack([0], [safe], budget + 1)


@st.composite
def damage(draw, content: bytes) -> bytes:
    """A file cut short, lengthened, or with some bytes changed."""
    kind = draw(st.sampled_from(["cut", "grow", "change"]))
    place = draw(st.integers(0, len(content) - 1))
    if kind == "cut":
        return content[:place]
    if kind == "grow":
        return content[:place] + draw(st.binary(min_size=1, max_size=8)) + content[place:]
    out = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        # Headers decide more than the numbers behind them.
        out[draw(st.integers(0, min(400, len(out) - 1)) | st.integers(0, len(out) - 1))] = draw(st.integers(0, 255))
    return bytes(out)


@st.composite
def changed(draw, value):
    """JSON with one value replaced, anywhere."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        return value | {key: draw(changed(value[key]))}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], draw(changed(value[place])), *value[place + 1 :]]
    return draw(JSON)


@pytest.fixture(scope="module")
def trie_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trie") / "memory"
    drafter = jl.TrieDrafter(depth=3, vocab_size=50)
    drafter.insert([1, 2, 3, 1, 2, 4], key=("a", 1))
    drafter.insert([5, 6, 5], namespace="other", key="b")
    drafter.set_parent("other", None)
    drafter.begin("r", [1, 2])
    drafter.verified("r", drafter.draft("r", 4, 4), [0])
    drafter.end("r")
    drafter.save(path)
    return path


def load_and_use(content: bytes, path: Path) -> None:
    """A damaged file is refused and nothing changes, or it is harmless."""
    path.write_bytes(content)
    drafter = jl.TrieDrafter(depth=3, vocab_size=50)
    drafter.insert([7, 8, 9])
    before = drafter.stats()
    try:
        drafter.load(path)
    except TrieFileError as error:
        assert str(path) in str(error)
        assert drafter.stats() == before
    for namespace in (None, "other"):
        drafter.begin(namespace, [7, 8, 1, 2], namespace=namespace)
        draft = drafter.draft(namespace, 8, 8)
        assert all(0 <= token < 50 for token in draft.tokens)
        drafter.verified(namespace, draft, [])
        drafter.extend(namespace, [3])
        drafter.end(namespace)


@fuzz(150)
@hypothesis.given(st.data())
def test_damaged_trie_files(trie_file, tmp_path, data):
    load_and_use(data.draw(damage(trie_file.read_bytes())), tmp_path / "memory")


@fuzz(300)
@hypothesis.given(st.data())
def test_trie_files_with_another_header(trie_file, tmp_path, data):
    prefix = struct.Struct("<16sIQ")
    content = trie_file.read_bytes()
    magic, version, length = prefix.unpack(content[: prefix.size])
    header = json.loads(content[prefix.size : prefix.size + length])
    head = json.dumps(data.draw(changed(header))).encode()
    start = prefix.pack(magic, version, len(head)) + head + hashlib.sha256(head).digest()
    load_and_use(start + content[prefix.size + length + 32 :], tmp_path / "memory")


TRACE = {"name": "a", "task": "t", "split": "test", "prompt": [1], "response": [2, 3]}


@fuzz(200)
@hypothesis.given(st.one_of(st.binary(max_size=40), changed(TRACE).map(lambda row: json.dumps(row).encode())))
def test_any_traces_file(tmp_path, content):
    path = tmp_path / "traces.jsonl"
    path.write_bytes(content)
    try:
        rows = read_traces(path)
    except TraceError as error:
        assert str(path) in str(error)
        return
    assert all(row.prompt and row.response for row in rows)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A copy of a small checkpoint."""
    return Path(shutil.copytree(GOLDEN / "llama3", tmp_path / "checkpoint"))


def load_only(path: Path) -> None:
    try:
        jl.load(path, tokenizer=None)
    except ValueError as error:
        assert str(path) in str(error)


@fuzz(40)
@hypothesis.given(st.data())
def test_damaged_weights(checkpoint, data):
    content = (GOLDEN / "llama3" / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(data.draw(damage(content)))
    load_only(checkpoint)


@fuzz(60)
@hypothesis.given(st.data())
def test_checkpoints_with_another_configuration(checkpoint, data):
    config = json.loads((GOLDEN / "llama3" / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(data.draw(changed(config))))
    load_only(checkpoint)
