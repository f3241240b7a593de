"""Shared memory of the trie drafter: documents by namespace, in one bounded index."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from jaxlookahead.drafters.calibration import Calibration
from jaxlookahead.drafters.removal import remove_document, remove_root
from jaxlookahead.drafters.suffix_index import FIRST, MAX_TOKEN, SHIFT, SuffixIndex

SHARDS = 509
# Tokens inserted before other threads get a turn.
CHUNK = 256
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
        """Puts a document in, holding `lock` for a chunk at a time. No other writer may be at work."""
        if not tokens:
            return
        index = self.index
        live: list[int] = []
        with lock:
            # In order of use, for dropping the longest unused one.
            root = self.root(namespace)
            self.roots[namespace] = self.roots.pop(namespace)
            start, shifted = index.position, index.shifted
        for begin in range(0, len(tokens), CHUNK):
            with lock:
                for token in tokens[begin : begin + CHUNK]:
                    live = index.push(root, live, token)
        with lock:
            index.close(root, live)
            stop = index.position
            moved = index.shifted - shifted
            if moved:
                start -= moved
                for document in self.documents.values():
                    document.start -= moved
                    document.stop -= moved
            self.record(Document(namespace, key, start, stop))
            self.inserted += len(tokens)
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
