"""Live requests of one namespace draft from each other's tokens as they are emitted.

Samples of one prompt say much the same. What a sample said joins shared memory when it ends; until then its siblings
find it here. Only responses are ever drafted; the end of a prompt serves as context.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from jaxlookahead.drafters.sources import Source

# Tokens by which a place in a sibling is found, tokens compared there, and how many equal ones make a long match.
KEY = 3
COMPARED = 32
LONG = 8


@dataclasses.dataclass(slots=True)
class _Live:
    """A live request: the end of its prompt and its response, and the keys under which its places are noted."""

    namespace: Hashable | None
    text: list[int]
    keys: dict[tuple[int, ...], None] = dataclasses.field(default_factory=dict)


# A place in a sibling: its text, the position of the last matched token, the length of the match.
_Copy = tuple[list[int], int, int]
# Latest places by the `KEY` tokens that end there, then by request.
_Places = dict[tuple[int, ...], dict[Hashable, int]]
# The last `KEY` tokens of a path, and where siblings said the same.
_State = tuple[_Places, Hashable, tuple[int, ...], list[_Copy]]


class LiveTexts:
    """The texts of all live requests, by namespace."""

    def __init__(self) -> None:
        self._live: dict[Hashable, _Live] = {}
        # By namespace.
        self._places: dict[Hashable | None, _Places] = {}
        self._count: dict[Hashable | None, int] = {}

    def begin(self, request: Hashable, prompt: Sequence[int], namespace: Hashable | None) -> None:
        self._live[request] = _Live(namespace, list(prompt[-COMPARED:]))
        self._count[namespace] = self._count.get(namespace, 0) + 1

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        live = self._live[request]
        places = self._places.setdefault(live.namespace, {})
        for token in tokens:
            key = tuple(live.text[-KEY:])
            live.text.append(token)
            if len(key) == KEY:
                found = places.setdefault(key, {})
                # In order of recency.
                found.pop(request, None)
                found[request] = len(live.text) - 2
                live.keys[key] = None

    def end(self, request: Hashable) -> None:
        live = self._live.pop(request)
        places = self._places.get(live.namespace, {})
        for key in live.keys:
            del places[key][request]
            if not places[key]:
                del places[key]
        self._count[live.namespace] -= 1
        if not self._count[live.namespace]:
            del self._count[live.namespace]
            self._places.pop(live.namespace, None)

    def any(self, namespace: Hashable | None) -> bool:
        """Whether requests of a namespace have siblings that have said something."""
        return self._count.get(namespace, 0) > 1 and namespace in self._places

    def open(self, request: Hashable, namespace: Hashable | None, newest: Sequence[int]) -> _State:
        """Where siblings said what `newest` ends in."""
        tail = tuple(newest[-KEY:])
        places = self._places.get(namespace, {})
        return places, request, tail, self.copies(places, request, tail, newest)

    def copies(self, places: _Places, request: Hashable, tail: tuple[int, ...], newest: Sequence[int]) -> list[_Copy]:
        """The latest place of `tail` in each sibling of `request`, newest first; where some of the matches are long,
        those alone, and otherwise the longest alone. `newest` ends in `tail`."""
        found = places.get(tail)
        if found is None:
            return []
        copies: list[_Copy] = []
        longest = 0
        for other in reversed(found):
            if other != request:
                text, position = self._live[other].text, found[other]
                length = KEY
                most = min(COMPARED, len(newest), position + 1)
                while length < most and text[position - length] == newest[-1 - length]:
                    length += 1
                longest = max(longest, length)
                copies.append((text, position, length))
        least = min(longest, LONG)
        return [copy for copy in copies if copy[2] >= least]


class SiblingSource(Source):
    """Copies from siblings. Several siblings vote for what comes next."""

    name = "siblings"
    first = True
    start = 0.7

    def __init__(self, texts: LiveTexts) -> None:
        """`texts` are the live requests; whoever owns them tells them of beginnings, tokens and ends."""
        self._texts = texts

    def open(
        self, request: Hashable, namespace: Hashable | None, text: Sequence[int], budget: int, max_depth: int
    ) -> Any:
        return self._texts.open(request, namespace, text[-COMPARED:])

    def predict(self, state: _State) -> Sequence[tuple[int, float]]:
        copies = state[3]
        if not copies:
            return ()
        votes: dict[int, int] = {}
        for text, position, _ in copies:
            if position + 1 < len(text):
                token = text[position + 1]
                votes[token] = votes.get(token, 0) + 1
        if len(votes) == 1:
            return [(token, count / len(copies)) for token, count in votes.items()]
        return [(token, count / len(copies)) for token, count in sorted(votes.items(), key=lambda item: -item[1])]

    def step(self, state: _State, token: int) -> _State:
        places, request, tail, copies = state
        tail = (*tail[1 - KEY :], token)
        if copies:
            copies = [
                (text, position + 1, length + 1)
                for text, position, length in copies
                if position + 1 < len(text) and text[position + 1] == token
            ]
        if not copies and tail in places:
            copies = self._texts.copies(places, request, tail, tail)
        return places, request, tail, copies
