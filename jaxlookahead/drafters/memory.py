"""Shared memory of the trie drafter: documents by namespace, in one bounded index."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from jaxlookahead.drafters.calibration import Calibration
from jaxlookahead.drafters.removal import remove_document, remove_root
from jaxlookahead.drafters.suffix_index import FIRST, MAX_TOKEN, SHIFT, SuffixIndex

SHARDS = 509
# Tokens inserted before other threads get a turn, and before a call that must not stall returns (some 10 ms).
CHUNK = 256
BURST = 2048
MAX_CALIBRATIONS = 256


def token_list(name: str, tokens: Sequence[int], vocab_size: int | None = None) -> list[int]:
    """Token ids as a list of plain integers.

    Raises:
      ValueError: an id is not an integer, negative or too large.
    """
    found = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    if set(map(type, found)) - {int}:
        try:
            found = [operator.index(token) for token in found]
        except TypeError:
            raise ValueError(f"{name} must be a flat sequence of integer token ids") from None
    limit = MAX_TOKEN if vocab_size is None else vocab_size
    if found and (min(found) < 0 or max(found) >= limit):
        bad = next(token for token in found if not 0 <= token < limit)
        raise ValueError(f"{name} holds the token id {bad}: ids must be from 0 to {limit - 1}")
    return found


@dataclasses.dataclass(slots=True)
class Document:
    """A document in shared memory: positions `[start, stop)` of the text, closing `END` included."""

    namespace: Hashable | None
    key: Hashable | None
    start: int
    stop: int


@dataclasses.dataclass(slots=True)
class _Job:
    """A document that waits to be put in, or is being put in.

    Attributes:
      done: tokens that are in.
      root: the root of its namespace, 0 until it is begun.
      live: the contexts that its last token ended.
      start: position of its first token.
      shifted: the index's `shifted` at its beginning.
    """

    tokens: Sequence[int]
    namespace: Hashable | None
    key: Hashable | None
    done: int = 0
    root: int = 0
    live: list[int] = dataclasses.field(default_factory=list)
    start: int = 0
    shifted: int = 0


class Memory:
    """Documents by namespace, in one bounded suffix index.

    Attributes:
      index: the index.
      documents: the documents whose text is still held, oldest first, by number.
      roots: the root of each namespace.
      parents: the namespace that a namespace falls back on.
    """

    def __init__(self, depth: int, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.index = SuffixIndex(depth, max_nodes=max_nodes, shards=SHARDS)
        self.documents: dict[int, Document] = {}
        self.roots: dict[Hashable | None, int] = {}
        self.parents: dict[Hashable | None, Hashable | None] = {}
        self.calibrations: dict[Hashable | None, Calibration] = {}
        self.inserted = 0
        self._by_key: dict[Hashable, list[int]] = {}
        self._next = 0
        self._held: dict[Hashable | None, int] = {}
        self._waiting: collections.deque[_Job] = collections.deque()

    def root(self, namespace: Hashable | None) -> int:
        """The root of a namespace, opened where there is none."""
        root = self.roots.get(namespace)
        if root is None:
            if len(self.roots) >= max(self.max_nodes // 64, 2):
                self._drop_idle_namespace()
            root = self.roots[namespace] = self.index.new_root()
        return root

    def calibration(self, namespace: Hashable | None) -> Calibration:
        """The weights learnt in a namespace. Those of the least recently used namespaces are forgotten."""
        found = self.calibrations.pop(namespace, None) or Calibration()
        self.calibrations[namespace] = found
        if len(self.calibrations) > MAX_CALIBRATIONS:
            del self.calibrations[next(iter(self.calibrations))]
        return found

    def ancestors(self, namespace: Hashable | None) -> Iterator[Hashable | None]:
        """The namespaces a namespace falls back on, nearest first."""
        while namespace in self.parents:
            namespace = self.parents[namespace]
            yield namespace

    def set_parent(self, namespace: Hashable, parent: Hashable | None) -> None:
        """Lets a namespace fall back on another.

        Raises:
          ValueError: it would become its own ancestor.
        """
        if namespace == parent or namespace in self.ancestors(parent):
            raise ValueError(f"namespace {namespace!r} can't fall back on {parent!r}, which falls back on it")
        self.parents[namespace] = parent

    def hold(self, namespace: Hashable | None) -> None:
        """Keeps a namespace from being dropped while a request of it is alive."""
        self._held[namespace] = self._held.get(namespace, 0) + 1

    def let_go(self, namespace: Hashable | None) -> None:
        """Undoes one `hold`."""
        self._held[namespace] -= 1
        if not self._held[namespace]:
            del self._held[namespace]

    def insert(
        self,
        tokens: Sequence[int],
        namespace: Hashable | None,
        key: Hashable | None,
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        """Puts a document in, after those that wait, holding `lock` for a chunk at a time. No other writer may be at
        work."""
        with lock:
            self.enqueue(tokens, namespace, key)
        self.work(lock)

    def enqueue(self, tokens: Sequence[int], namespace: Hashable | None, key: Hashable | None) -> None:
        """Notes a document for `work` to put in."""
        if tokens:
            self.hold(namespace)
            self._waiting.append(_Job(tokens, namespace, key))

    def work(self, lock: contextlib.AbstractContextManager[Any], most: int | None = None) -> None:
        """Puts waiting documents in, in order, `most` tokens in all, or everything.

        `lock` is held for a chunk at a time. No other writer may be at work.
        """
        while self._waiting and (most is None or most > 0):
            chunk = CHUNK if most is None else min(CHUNK, most)
            with lock:
                done = self._put(self._waiting[0], chunk)
                if self._waiting[0].done == len(self._waiting[0].tokens):
                    self._close(self._waiting.popleft())
            if most is not None:
                most -= done

    def _put(self, job: _Job, most: int) -> int:
        """Puts the next tokens of a document in; returns how many."""
        index = self.index
        if not job.root:
            # In order of use, for dropping the longest unused one.
            job.root = self.root(job.namespace)
            self.roots[job.namespace] = self.roots.pop(job.namespace)
            job.start, job.shifted = index.position, index.shifted
        tokens = job.tokens[job.done : job.done + most]
        live = job.live
        for token in tokens:
            live = index.push(job.root, live, token)
        job.live = live
        job.done += len(tokens)
        return len(tokens)

    def _close(self, job: _Job) -> None:
        index = self.index
        index.close(job.root, job.live)
        stop = index.position
        moved = index.shifted - job.shifted
        if moved:
            job.start -= moved
            for document in self.documents.values():
                document.start -= moved
                document.stop -= moved
        self.record(Document(job.namespace, job.key, job.start, stop))
        self.inserted += len(job.tokens)
        self.let_go(job.namespace)
        self._drop_overwritten()

    def record(self, document: Document) -> None:
        """Notes that a document is in the text."""
        self.documents[self._next] = document
        if document.key is not None:
            self._by_key.setdefault(document.key, []).append(self._next)
        self._next += 1

    def forget(self, key: Hashable) -> int:
        """Removes all documents of a key; returns how many there were."""
        numbers = self._by_key.pop(key, [])
        for number in numbers:
            document = self.documents.pop(number)
            root = self.roots[document.namespace]
            ends = [d.stop - 1 for d in self.documents.values() if d.namespace == document.namespace]
            remove_document(self.index, root, document.start, document.stop, ends)
        return len(numbers)

    def replace(self, other: Memory) -> None:
        """Takes over everything of another memory; what live requests hold on to stays."""
        version = self.index.version
        held = self._held
        self.__dict__.update(other.__dict__)
        self._held = held
        # Live requests have to find their places anew.
        self.index.version += version + 1

    def forget_namespace(self, namespace: Hashable | None) -> None:
        """Removes everything of a namespace.

        Raises:
          ValueError: a request of it is alive.
        """
        if namespace in self._held:
            raise ValueError(f"namespace {namespace!r} has live requests: end them first")
        root = self.roots.pop(namespace, None)
        if root is not None:
            remove_root(self.index, root)
        self.calibrations.pop(namespace, None)
        self.parents.pop(namespace, None)
        for number in [n for n, document in self.documents.items() if document.namespace == namespace]:
            self._drop_record(number)

    def stats(self) -> dict[str, Any]:
        """Sizes."""
        return {
            "nodes": self.index.used,
            "max_nodes": self.index.max_nodes,
            "tokens": self.inserted,
            "waiting": sum(len(job.tokens) - job.done for job in self._waiting),
            "documents": len(self.documents),
            "namespaces": len(self.roots),
            "bytes": self.index.memory_bytes() + 200 * len(self.documents),
        }

    def _drop_overwritten(self) -> None:
        oldest = self.index.position - self.index.text_capacity
        while self.documents:
            number = next(iter(self.documents))
            if self.documents[number].start >= oldest:
                break
            self._drop_record(number)

    def _drop_record(self, number: int) -> None:
        document = self.documents.pop(number)
        if document.key is not None:
            numbers = self._by_key.get(document.key, [])
            if number in numbers:
                numbers.remove(number)
            if not numbers:
                self._by_key.pop(document.key, None)

    def _drop_idle_namespace(self) -> None:
        for namespace, root in self.roots.items():
            if namespace not in self._held and namespace is not None:
                if self.index.nodes[(root << SHIFT) + FIRST]:
                    self.forget_namespace(namespace)
                else:
                    self.index.drop_root(self.roots.pop(namespace))
                return
