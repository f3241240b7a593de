"""Suffix counts of the request and of past responses, expanded best first."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

from jaxlookahead.drafters.protocol import Draft, DrafterBase


class _Node:
    __slots__ = ("count", "kids")

    def __init__(self) -> None:
        self.count = 0
        self.kids: dict[int, _Node] = {}


class _Counts:
    def __init__(self, depth: int) -> None:
        self.root = _Node()
        self.depth = depth
        self.live: list[_Node] = []

    def push(self, token: int) -> None:
        live = []
        for node in [*self.live, self.root]:
            kid = node.kids.get(token)
            if kid is None:
                kid = node.kids[token] = _Node()
            kid.count += 1
            live.append(kid)
        self.live = live[-self.depth + 1 :]

    def cut(self) -> None:
        self.live = []


class TrieDrafter(DrafterBase):
    """First version: contexts of both memories blended with PPM escapes."""

    def __init__(self, depth: int = 24, request_weight: float = 4.0, max_context: int = 12) -> None:
        self.depth = depth
        self.request_weight = request_weight
        self.max_context = max_context
        self._shared: dict[Hashable | None, _Counts] = {}
        self._requests: dict[Hashable, tuple[_Counts, list[int], int, Hashable | None]] = {}

    def insert(self, tokens: Sequence[int], *, namespace: Hashable | None = None) -> None:
        counts = self._shared.setdefault(namespace, _Counts(self.depth))
        for token in tokens:
            counts.push(token)
        counts.cut()

    def begin(self, request: Hashable, prompt: Sequence[int], *, namespace: Hashable | None = None) -> None:
        counts = _Counts(self.depth)
        for token in prompt:
            counts.push(token)
        self._requests[request] = (counts, list(prompt), len(prompt), namespace)

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        counts, text, _, _ = self._requests[request]
        for token in tokens:
            counts.push(token)
            text.append(token)

    def end(self, request: Hashable, *, remember: bool = True) -> None:
        _, text, start, namespace = self._requests.pop(request)
        if remember:
            self.insert(text[start:], namespace=namespace)

    def draft(self, request: Hashable, budget: int, max_depth: int) -> Draft:
        own, text, _, namespace = self._requests[request]
        shared = self._shared.setdefault(namespace, _Counts(self.depth))
        draft = Draft(probs=[])
        heap: list[tuple[float, int, int, int, int, list[tuple[_Node | None, _Node | None]]]] = []
        pushed = 0

        def expand(states: list[tuple[_Node | None, _Node | None]], path: float, parent: int, depth: int) -> None:
            nonlocal pushed
            rest = path
            found: dict[int, float] = {}
            for a, b in states:
                votes: dict[int, float] = {}
                if a is not None:
                    for token, kid in a.kids.items():
                        votes[token] = self.request_weight * kid.count
                if b is not None:
                    for token, kid in b.kids.items():
                        votes[token] = votes.get(token, 0.0) + kid.count
                if not votes:
                    continue
                total = sum(votes.values()) + len(votes)
                for token, vote in votes.items():
                    found[token] = found.get(token, 0.0) + rest * vote / total
                rest *= len(votes) / total
                if rest < 1e-3 * path:
                    break
            for token, prob in found.items():
                pushed += 1
                heapq.heappush(heap, (-prob, pushed, token, parent, depth, states))

        states: list[tuple[_Node | None, _Node | None]] = []
        for length in range(min(self.max_context, len(text)), 0, -1):
            a: _Node | None = own.root
            b: _Node | None = shared.root
            for token in text[-length:]:
                a = a.kids.get(token) if a is not None else None
                b = b.kids.get(token) if b is not None else None
            if a is not None or b is not None:
                states.append((a, b))
        if max_depth > 0:
            expand(states, 1.0, -1, 1)
        while heap and len(draft) < budget:
            prob, _, token, parent, depth, states = heapq.heappop(heap)
            draft.tokens.append(token)
            draft.parents.append(parent)
            draft.probs.append(-prob)
            if depth == max_depth:
                continue
            moved = []
            for a, b in [*states, (own.root, shared.root)]:
                a = a.kids.get(token) if a is not None else None
                b = b.kids.get(token) if b is not None else None
                if a is not None or b is not None:
                    moved.append((a, b))
            expand(moved, -prob, len(draft) - 1, depth + 1)
        return draft
