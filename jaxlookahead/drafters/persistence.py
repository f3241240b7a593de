"""Files of shared memory: plain arrays behind a checked header.

Layout: 16 bytes of magic, the format version and the header's length (little-endian uint32 and uint64), the header
(JSON, UTF-8), its SHA-256, then the arrays one after the other. The header names each array's dtype, length and
SHA-256, so a file is read whole or not at all. Nothing in a file is ever executed or unpickled, and what could lead
the drafter astray (parents, links, positions, ranks) is checked against what a suffix index can hold; what can be
computed (siblings, edges, references) is not stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import struct
from array import array
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from jaxlookahead.drafters.calibration import BINS, CONTEXTS, COPIES, Calibration
from jaxlookahead.drafters.memory import Document, Memory
from jaxlookahead.drafters.stored_index import TrieFileError, check_arrays, complete_records, edge_keys, require
from jaxlookahead.drafters.suffix_index import COUNT, DEPTH, LAST, LINK, PARENT, RANKED, STRIDE, TOKEN, TOP

MAGIC = b"JAXLOOKAHEADTRIE"
VERSION = 1
_PREFIX = struct.Struct("<16sIQ")
_DIGEST = 32
_WEIGHTS = {"copy": 2 * COPIES, "context": 2 * CONTEXTS}


def tokenizer_fingerprint(vocabulary: Iterable[tuple[str, int]] | dict[str, int]) -> str:
    """A digest of a vocabulary, for telling files of different tokenizers apart.

    Args:
      vocabulary: tokens and their ids, as a tokenizer's `get_vocab()` gives them.
    """
    items = vocabulary.items() if isinstance(vocabulary, dict) else vocabulary
    digest = hashlib.sha256()
    for token, number in sorted(items, key=lambda item: (item[1], item[0])):
        digest.update(f"{number}:{len(token)}:{token}\n".encode())
    return digest.hexdigest()


def _encode(name: Hashable | None) -> Any:
    if name is None or type(name) in (str, int, bool):
        return name
    if type(name) is tuple:
        return {"tuple": [_encode(part) for part in name]}
    raise TypeError(f"{name!r} can't be saved: only None, str, int, bool and tuples of them can")


def _decode(name: Any, depth: int = 0) -> Hashable | None:
    if name is None or type(name) in (str, int, bool):
        return name
    if depth < 16 and type(name) is dict and list(name) == ["tuple"] and type(name["tuple"]) is list:
        return tuple(_decode(part, depth + 1) for part in name["tuple"])
    raise TrieFileError("holds a name that is not None, str, int, bool or a tuple of them")


def _savable(key: Hashable | None) -> Any:
    try:
        return _encode(key)
    except TypeError:
        return None


def pack(memory: Memory, vocab_size: int | None, fingerprint: str | None) -> list[bytes]:
    """The parts of a file.

    Raises:
      TypeError: a namespace is not made of None, str, int, bool and tuples.
    """
    index = memory.index
    roots = list(memory.roots.items())
    nodes = np.frombuffer(index.nodes, np.int32).reshape(-1, STRIDE).copy()
    root_ids = np.array([root for _, root in roots], np.int64)
    below = np.flatnonzero(nodes[:, DEPTH] > 0)
    order = np.concatenate([root_ids, below[np.argsort(nodes[below, DEPTH], kind="stable")]]).astype(np.int64)
    number = np.full(len(nodes), -1, np.int64)
    number[order] = np.arange(len(order))
    oldest = max(index.position - min(index.text_capacity, len(index.text)), 0)
    held = np.arange(oldest, index.position) % index.text_capacity
    text = np.frombuffer(index.text, np.int32)[held] if len(held) else np.zeros(0, np.int32)
    earlier = np.frombuffer(index.earlier, np.int32)[held] if len(held) else np.zeros(0, np.int32)
    kept = nodes[order]
    ranks = np.full(len(nodes), -1, np.int64)
    for rank in range(RANKED):
        ranks[nodes[order, TOP + rank]] = rank
    ranks[0] = -1
    names = {namespace: i for i, (namespace, _) in enumerate(roots)}
    documents = [d for d in memory.documents.values() if d.start >= oldest]
    spans = [(names[d.namespace], d.start - oldest, d.stop - oldest) for d in documents]
    arrays: dict[str, np.ndarray] = {
        "text": text,
        "earlier": np.maximum(earlier - oldest, -1),
        "token": kept[:, TOKEN],
        "parent": np.where(kept[:, DEPTH] > 0, number[kept[:, PARENT]], -1),
        "count": kept[:, COUNT],
        "last": np.maximum(kept[:, LAST] - oldest, -1),
        "link": np.where(kept[:, DEPTH] > 0, number[kept[:, LINK]], -1),
        "rank": ranks[order],
        "spans": np.array(spans, np.int64).reshape(-1),
    }
    calibrations: list[dict[str, Any]] = []
    for namespace, calibration in memory.calibrations.items():
        if namespace in names:
            i = len(calibrations)
            extra = {name: [w[0], n[0]] for name, (w, n) in calibration.extra.items()}
            row = {"namespace": names[namespace], "extra": extra}
            calibrations.append(row | {"estimated": calibration.estimated, "accepted": calibration.accepted})
            for kind in _WEIGHTS:
                arrays[f"{kind}/{i}"] = np.array(getattr(calibration, kind), np.float64)
                arrays[f"{kind}_seen/{i}"] = np.array(getattr(calibration, kind + "_seen"), np.int64)
    blobs = []
    table = []
    for name, values in arrays.items():
        dtype = "<f8" if values.dtype.kind == "f" else "<i8" if name in ("spans",) or "_seen" in name else "<i4"
        blob = np.ascontiguousarray(values).astype(dtype).tobytes()
        blobs.append(blob)
        row = {
            "name": name,
            "dtype": dtype,
            "length": len(values),
            "sha256": hashlib.sha256(blob).hexdigest(),
        }
        table.append(row)
    header = {
        "depth": index.depth,
        "vocab_size": vocab_size,
        "tokenizer": fingerprint,
        "namespaces": [_encode(namespace) for namespace, _ in roots],
        "parents": [[_encode(child), _encode(parent)] for child, parent in memory.parents.items()],
        "keys": [_savable(d.key) for d in documents],
        "inserted": memory.inserted,
        "calibrations": calibrations,
        "arrays": table,
    }
    head = json.dumps(header).encode()
    return [_PREFIX.pack(MAGIC, VERSION, len(head)), head, hashlib.sha256(head).digest(), *blobs]


def write_atomically(path: str | os.PathLike[str], parts: Iterable[bytes]) -> None:
    """Writes a file so that its name holds either what it held before or all of the new content.

    A symbolic link stays one: its target is written. A new file gets the permissions that any new file gets, one
    that was there keeps its own.
    """
    path = os.path.realpath(path)
    temporary = f"{path}.{secrets.token_hex(8)}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            os.chmod(temporary, stat.S_IMODE(os.stat(path).st_mode))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def unpack(
    path: str | os.PathLike[str], max_nodes: int, depth: int, vocab_size: int | None, fingerprint: str | None
) -> Memory:
    """Reads a file into a new memory.

    Args:
      path: the file.
      max_nodes: cap of the new memory.
      depth: context length that the file must have.
      vocab_size: vocabulary size that the file must have, or None.
      fingerprint: tokenizer fingerprint that the file must have, or None.

    Raises:
      TrieFileError: the file can't be read, is not such a file, is damaged, or was made with something else.
    """
    try:
        return _unpack(path, max_nodes, depth, vocab_size, fingerprint)
    except TrieFileError as error:
        raise TrieFileError(f"{os.fspath(path)} {error}") from None
    except OSError as error:
        raise TrieFileError(f"{os.fspath(path)} can't be read: {error.strerror or error}") from None
    except (LookupError, ArithmeticError, AttributeError, ValueError, TypeError, RecursionError, MemoryError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise TrieFileError(f"{os.fspath(path)} is damaged ({reason})") from None


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_PREFIX.size)
        require(start[: len(MAGIC)] == MAGIC and len(start) == _PREFIX.size, "is not a jaxlookahead trie file")
        _, version, length = _PREFIX.unpack(start)
        require(version == VERSION, f"has format version {version}; this release reads version {VERSION}")
        require(length <= size - _PREFIX.size - _DIGEST, "is truncated")
        head = file.read(length)
        require(hashlib.sha256(head).digest() == file.read(_DIGEST), "is corrupted: the header's checksum differs")
        header = json.loads(head)
        require(type(header) is dict and type(header["arrays"]) is list, "has a malformed header")
        arrays = {}
        left = size - file.tell()
        for row in header["arrays"]:
            name, dtype, count = row["name"], row["dtype"], row["length"]
            require(dtype in ("<i4", "<i8", "<f8") and type(count) is int and count >= 0, "has a malformed header")
            count_bytes = count * int(dtype[2])
            left -= count_bytes
            require(left >= 0, "is truncated")
            blob = file.read(count_bytes)
            digest = hashlib.sha256(blob).hexdigest()
            require(digest == row["sha256"], f"is corrupted: the checksum of {name!r} differs")
            arrays[name] = np.frombuffer(blob, dtype)
        require(left == 0, "goes on after its end")
    return header, arrays


def _unpack(
    path: str | os.PathLike[str], max_nodes: int, depth: int, vocab_size: int | None, fingerprint: str | None
) -> Memory:
    header, arrays = _read(path)
    if fingerprint is not None and header["tokenizer"] is None:
        raise TrieFileError(
            "names no tokenizer: save it from a TrieDrafter made with vocab_size and tokenizer_fingerprint"
        )
    if fingerprint is not None and header["tokenizer"] != fingerprint:
        raise TrieFileError("was made with another tokenizer (its fingerprint differs)")
    if vocab_size is not None and header["vocab_size"] != vocab_size:
        raise TrieFileError(f"was made for vocab_size={header['vocab_size']}, not {vocab_size}")
    require(header["depth"] == depth, f"has depth={header['depth']}, not {depth}: use a drafter of that depth")
    namespaces = [_decode(name) for name in header["namespaces"]]
    require(len(set(namespaces)) == len(namespaces), "names a namespace twice")
    text, earlier = arrays["text"], arrays["earlier"]
    columns = [arrays[name] for name in ("token", "parent", "count", "last", "link", "rank")]
    check_arrays(text, earlier, columns, len(namespaces), depth, vocab_size)
    size = len(columns[0])
    need = max(size, len(text))
    require(
        need <= max_nodes,
        f"holds {size} nodes, {len(text)} tokens: use a drafter with max_nodes={need} or more",
    )
    memory = Memory(depth, max_nodes)
    index = memory.index
    index.text = array("i", text.astype("=i4").tobytes())
    index.earlier = array("i", earlier.astype("=i4").tobytes())
    index.position = len(text)
    records = complete_records(columns, len(namespaces))
    index.nodes = array("i", records.tobytes())
    index.used = size
    for node, key in enumerate(edge_keys(columns).tolist(), 1):
        if node > len(namespaces):
            index.edges[key % index.shards][key] = node
    memory.roots = {namespace: i + 1 for i, namespace in enumerate(namespaces)}
    for child, parent in header["parents"]:
        memory.set_parent(_decode(child), _decode(parent))
    spans = arrays["spans"].reshape(-1, 3)
    require(len(spans) == len(header["keys"]), "has documents without keys")
    for (name, start, stop), key in zip(spans.tolist(), header["keys"], strict=True):
        require(0 <= name < len(namespaces) and 0 <= start < stop <= len(text), "has a document out of range")
        memory.record(Document(namespaces[name], _decode(key), start, stop))
    memory.inserted = int(header["inserted"])
    for i, row in enumerate(header["calibrations"]):
        memory.calibrations[namespaces[row["namespace"]]] = _calibration(arrays, i, row)
    return memory


def _calibration(arrays: dict[str, np.ndarray], i: int, row: dict[str, Any]) -> Calibration:
    calibration = Calibration()
    bins = np.array([row["estimated"], row["accepted"]], np.float64)
    require(bins.shape == (2, BINS + 1) and np.isfinite(bins).all(), "has wrong weights")
    require((bins[0] > 1e-6).all() and (bins[1] >= 0).all(), "has wrong weights")
    calibration.estimated, calibration.accepted = bins.tolist()
    calibration.settle()
    for kind, length in _WEIGHTS.items():
        weights, seen = arrays[f"{kind}/{i}"], arrays[f"{kind}_seen/{i}"]
        fits = len(weights) == len(seen) == length and weights.dtype.kind == "f" and seen.dtype.kind == "i"
        require(fits and bool(((weights >= 0) & (weights <= 1)).all()) and (seen >= 0).all(), "has wrong weights")
        setattr(calibration, kind, weights.tolist())
        setattr(calibration, kind + "_seen", seen.tolist())
    for name, (weight, seen_count) in row["extra"].items():
        require(0 <= weight <= 1 and seen_count >= 0, "has wrong weights")
        calibration.extra[name] = ([float(weight)], [int(seen_count)])
    return calibration
