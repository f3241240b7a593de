"""Live requests of one namespace draft from each other's tokens as they are emitted.

Samples of one prompt say much the same. What a sample said joins shared memory when it ends; until then its siblings
find it here. Only responses are ever drafted; the end of a prompt serves as context.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

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


class _Copy(NamedTuple):
    """A place in a sibling: the last matched token and the length of the match."""

    text: list[int]
    position: int
    length: int


class _State(NamedTuple):
    places: dict[tuple[int, ...], dict[Hashable, int]]
    request: Hashable
    tail: tuple[int, ...]
    copies: list[_Copy]


class LiveTexts:
    """The texts of all live requests, by namespace."""

    def __init__(self) -> None:
        self._live: dict[Hashable, _Live] = {}
        # By namespace, then by the `KEY` tokens that a response token followed, then by request: the latest place.
        self._places: dict[Hashable | None, dict[tuple[int, ...], dict[Hashable, int]]] = {}
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

    def copies(self, state: _State, newest: Sequence[int]) -> list[_Copy]:
        """The places in siblings that the state's key is found at, newest first, those of the longest match alone.

        Args:
          state: its own request is left out.
          newest: the tokens up to the place looked from.
        """
        found = state.places.get(state.tail, {})
        copies = []
        for request in reversed(found):
            if request != state.request:
                text, position = self._live[request].text, found[request]
                length = KEY
                most = min(COMPARED, len(newest), position + 1)
                while length < most and text[position - length] == newest[-1 - length]:
                    length += 1
                copies.append(_Copy(text, position, length))
        least = min(max((copy.length for copy in copies), default=0), LONG)
        return [copy for copy in copies if copy.length >= least]


class SiblingSource(Source):
    """Copies from siblings, of long matches or of short ones, which deserve different trust.

    Several siblings vote for what comes next.
    """

    def __init__(self, texts: LiveTexts, *, long: bool) -> None:
        """
        Args:
          texts: the live requests; whoever owns them tells them of beginnings, tokens and ends.
          long: matches of at least `LONG` tokens, asked before all other text; or shorter ones, asked last.
        """
        self.name = "siblings" if long else "siblings_short"
        self.first = long
        self.start = 0.7 if long else 0.3
        self._texts = texts
        self._long = long

    def open(
        self, request: Hashable, namespace: Hashable | None, text: Sequence[int], budget: int, max_depth: int
    ) -> Any:
        tail = tuple(text[-KEY:])
        state = _State(self._texts._places.get(namespace, {}), request, tail, [])
        return state._replace(copies=self._texts.copies(state, text[-COMPARED:]))

    def predict(self, state: _State) -> Sequence[tuple[int, float]]:
        copies = state.copies
        if not copies or (max(copy.length for copy in copies) >= LONG) != self._long:
            return ()
        votes: dict[int, int] = {}
        for text, position, _ in copies:
            if position + 1 < len(text):
                token = text[position + 1]
                votes[token] = votes.get(token, 0) + 1
        return [(token, count / len(copies)) for token, count in sorted(votes.items(), key=lambda item: -item[1])]

    def step(self, state: _State, token: int) -> _State:
        tail = (*state.tail[1 - KEY :], token)
        copies = [
            _Copy(text, position + 1, length + 1)
            for text, position, length in state.copies
            if position + 1 < len(text) and text[position + 1] == token
        ]
        state = _State(state.places, state.request, tail, copies)
        return state if copies else state._replace(copies=self._texts.copies(state, tail))
