"""Files of shared memory: what is loaded drafts as what was saved, and nothing else is loaded."""

import hashlib
import json
import os
import pickle
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlookahead.drafters import TrieDrafter, TrieFileError, tokenizer_fingerprint
from jaxlookahead.drafters import persistence as files

texts_of = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=30), max_size=5)


def filled(texts, **options):
    drafter = TrieDrafter(**options)
    for i, text in enumerate(texts):
        namespace = (None, "a", ("b", 2))[i % 3]
        drafter.begin(i, text[:2], namespace=namespace)
        drafter.verified(i, drafter.draft(i, 4, 4), [0])
        drafter.extend(i, text[2:])
        drafter.end(i)
        drafter.insert(text, key=("doc", i))
    drafter.set_parent("a", None)
    return drafter


def probes(drafter):
    drafts = []
    for namespace in (None, "a", ("b", 2)):
        for prompt in ([0, 1], [2, 3, 0], [4], [1, 1]):
            drafter.begin("probe", prompt, namespace=namespace)
            drafts.append(drafter.draft("probe", 24, 10))
            drafter.end("probe", remember=False)
    return drafts


@settings(max_examples=40, deadline=None)
@given(texts_of)
def test_saved_and_loaded_draft_alike(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("trie") / "memory"
    drafter = filled(texts)
    drafter.save(path)
    loaded = TrieDrafter()
    loaded.load(path)
    assert loaded.stats() == drafter.stats() | {"bytes": loaded.stats()["bytes"]}
    for i in range(len(texts)):
        assert drafter.forget(("doc", i)) == loaded.forget(("doc", i)) == 1
    assert probes(loaded) == probes(drafter)
    for one in (drafter, loaded):
        one.insert([1, 2, 1, 2, 3])
        one.begin("r", [1, 2])
        one.extend("r", [3, 1, 2])
        one.end("r")
    assert probes(loaded) == probes(drafter)


def test_saved_after_eviction(tmp_path):
    rng = random.Random(0)
    drafter = filled([[rng.randrange(9) for _ in range(60)] for _ in range(40)], max_nodes=700)
    path = tmp_path / "memory"
    drafter.save(path)
    loaded = TrieDrafter(max_nodes=700)
    loaded.load(path)
    assert probes(loaded) == probes(drafter)
    for _ in range(30):
        text = [rng.randrange(9) for _ in range(60)]
        loaded.insert(text)
        assert loaded.stats()["nodes"] <= 700
    with pytest.raises(TrieFileError, match="max_nodes="):
        TrieDrafter(max_nodes=300).load(path)


def test_a_live_request_goes_on_after_loading(tmp_path):
    path = tmp_path / "memory"
    filled([[1, 2, 3, 4]] * 3).save(path)
    drafter = TrieDrafter()
    drafter.begin("r", [9, 1])
    assert drafter.draft("r", 4, 4).tokens == []
    drafter.load(path)
    assert drafter.draft("r", 4, 4).tokens[:2] == [2, 3]
    drafter.extend("r", [2])
    drafter.end("r")


def damaged(path):
    """Files that must be refused, each with what the message says."""
    good = path.read_bytes()
    half = len(good) // 2
    yield good[:half], "truncated|damaged|corrupted"
    yield good[:7], "not a jaxlookahead trie file"
    yield b"", "not a jaxlookahead trie file"
    yield pickle.dumps({"trie": [1, 2, 3]}), "not a jaxlookahead trie file"
    yield good + b"x", "after its end"
    yield good[:16] + struct.pack("<I", 99) + good[20:], "format version 99"
    for position in (21, 40, half, len(good) - 3):
        yield good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :], "corrupted|truncated"


def rewritten(path, change):
    """A file with valid checksums whose content was tampered with."""
    header, arrays = files._read(path)
    arrays = {name: values.copy() for name, values in arrays.items()}
    change(header, arrays)
    blobs = []
    for row in header["arrays"]:
        blob = arrays[row["name"]].astype(row["dtype"]).tobytes()
        row["length"] = len(arrays[row["name"]])
        row["sha256"] = hashlib.sha256(blob).hexdigest()
        blobs.append(blob)
    head = json.dumps(header).encode()
    return files._PREFIX.pack(files.MAGIC, 1, len(head)) + head + hashlib.sha256(head).digest() + b"".join(blobs)


def set_at(name, position, value):
    def change(header, arrays):
        arrays[name][position] = value

    return change


def tamper(name):
    def decorate(header, arrays):
        header[name] = {"a": 1}

    return decorate


TAMPERED = [
    set_at("parent", -1, 10**6),
    set_at("parent", -1, -5),
    set_at("parent", 5, 5),
    set_at("link", -1, 0),
    set_at("link", -1, 10**6),
    set_at("token", -1, -7),
    set_at("token", -1, 2**30),
    set_at("count", -1, 0),
    set_at("count", -1, 50),
    set_at("last", -1, 10**8),
    set_at("rank", 0, 0),
    set_at("rank", -1, 6),
    set_at("rank", -1, -2),
    set_at("text", 0, -2),
    set_at("text", 0, 2**30),
    set_at("earlier", 0, 3),
    set_at("spans", 1, 10**9),
    set_at("spans", 0, 77),
    set_at("copy/0", 0, 2.0),
    set_at("copy/0", 0, float("nan")),
    set_at("context_seen/0", 0, -1),
    lambda header, arrays: arrays.update(text=arrays["text"][:-1]),
    lambda header, arrays: arrays.update(token=arrays["token"][:-1]),
    lambda header, arrays: header["arrays"].pop(0),
    lambda header, arrays: header["namespaces"].append({"evil": 1}),
    lambda header, arrays: header["namespaces"].append(None),
    lambda header, arrays: header.pop("namespaces"),
    lambda header, arrays: header["keys"].append(1),
    lambda header, arrays: header.update(inserted="many"),
    lambda header, arrays: header["parents"].append(["a", "a"]),
    lambda header, arrays: header["calibrations"][0].update(namespace=99),
    lambda header, arrays: header["calibrations"][0].update(extra={"x": [5, 1]}),
    lambda header, arrays: header["calibrations"][0].update(estimated=[0.0] * 21),
    lambda header, arrays: header["calibrations"][0].update(accepted=[1.0]),
    tamper("calibrations"),
    tamper("keys"),
]


def test_F12_bad_files_change_nothing(tmp_path):
    path = tmp_path / "memory"
    filled([[1, 2, 3, 1, 2, 4], [2, 3, 1, 2], [0, 1, 2, 3]]).save(path)
    bad = [*damaged(path), *((rewritten(path, change), "bad (is|has|holds|names|goes) ") for change in TAMPERED)]
    drafter = filled([[4, 3, 2, 1, 4, 3]])
    before = probes(drafter), drafter.stats()
    for i, (content, message) in enumerate(bad):
        other = tmp_path / "bad"
        other.write_bytes(content)
        with pytest.raises(TrieFileError, match=message) as caught:
            drafter.load(other)
        assert str(other) in str(caught.value), i
        assert (probes(drafter), drafter.stats()) == before, i
    with pytest.raises(TrieFileError, match="can't be read"):
        drafter.load(tmp_path / "absent")
    with pytest.raises(TrieFileError, match="can't be read"):
        drafter.load(tmp_path)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["parent", "link", "token", "count", "last", "rank", "earlier", "text"]),
    st.integers(0, 10**6),
    st.data(),
)
def test_F12_any_tampered_array_is_refused_or_harmless(tmp_path_factory, name, position, data):
    folder = tmp_path_factory.mktemp("trie")
    filled([[1, 2, 3, 1, 2, 4], [2, 3, 1, 2], [0, 1, 2, 3]]).save(folder / "memory")

    def change(header, arrays):
        arrays[name][position % len(arrays[name])] = data.draw(st.integers(-3, 40))

    (folder / "bad").write_bytes(rewritten(folder / "memory", change))
    drafter = TrieDrafter()
    try:
        drafter.load(folder / "bad")
    except TrieFileError:
        assert drafter.stats()["nodes"] == 0
    else:
        probes(drafter)
        drafter.insert([1, 2, 3, 1, 2, 4])
        probes(drafter)


def test_F12_vocabulary_tokenizer_and_depth_are_checked(tmp_path):
    path = tmp_path / "memory"
    one = tokenizer_fingerprint({"a": 0, "b": 1})
    other = tokenizer_fingerprint({"a": 1, "b": 0})
    assert one != other == tokenizer_fingerprint([("b", 0), ("a", 1)])
    drafter = TrieDrafter(vocab_size=50, tokenizer_fingerprint=one)
    drafter.insert([1, 2, 3])
    drafter.save(path)
    TrieDrafter(vocab_size=50, tokenizer_fingerprint=one).load(path)
    TrieDrafter().load(path)
    for options, message in (
        ({"vocab_size": 51}, "vocab_size=50, not 51"),
        ({"tokenizer_fingerprint": other}, "another tokenizer"),
        ({"depth": 5}, "depth=6, not 5"),
    ):
        with pytest.raises(TrieFileError, match=message):
            TrieDrafter(**options).load(path)


def test_save_is_atomic(tmp_path, monkeypatch):
    path = tmp_path / "memory"
    filled([[1, 2, 3]]).save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        filled([[4, 5, 6]]).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["memory"]


@pytest.mark.skipif(os.name != "posix", reason="permissions and links as on POSIX")
def test_saved_as_any_other_file(tmp_path):
    drafter = filled([[1, 2, 3]])
    before = os.umask(0o027)
    try:
        drafter.save(tmp_path / "new")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
    (tmp_path / "new").chmod(0o604)
    (tmp_path / "link").symlink_to("new")
    filled([[4, 5, 6]]).save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o604
    drafter.load(tmp_path / "new")
    assert drafter.forget(("doc", 0)) == 1
    (tmp_path / "dangling").symlink_to("absent")
    drafter.save(tmp_path / "dangling")
    assert (tmp_path / "dangling").is_symlink() and (tmp_path / "absent").is_file()
    assert not [name for name in os.listdir(tmp_path) if "." in name]


def test_names_that_cannot_be_saved(tmp_path):
    drafter = TrieDrafter()
    drafter.insert([1, 2], namespace=frozenset([1]))
    with pytest.raises(TypeError, match="frozenset"):
        drafter.save(tmp_path / "memory")
    assert not os.listdir(tmp_path)
    drafter = TrieDrafter()
    drafter.insert([1, 2], key=object())
    drafter.save(tmp_path / "memory")
    loaded = TrieDrafter()
    loaded.load(tmp_path / "memory")
    assert loaded.stats()["documents"] == 1


def test_file_holds_no_code(tmp_path):
    path = tmp_path / "memory"
    filled([[1, 2, 3]]).save(path)
    with pytest.raises((ValueError, OSError, pickle.UnpicklingError)):
        np.load(path, allow_pickle=False)
    assert path.read_bytes()[:16] == b"JAXLOOKAHEADTRIE"


def test_a_file_that_names_no_tokenizer(tmp_path):
    TrieDrafter().save(tmp_path / "memory")
    with pytest.raises(TrieFileError, match="names no tokenizer"):
        TrieDrafter(tokenizer_fingerprint="a").load(tmp_path / "memory")
