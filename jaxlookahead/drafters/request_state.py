"""What the trie drafter keeps for one live request."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from jaxlookahead.drafters.calibration import MAX_MATCH, Calibration, success_bucket
from jaxlookahead.drafters.expansion import Place, Side, Texts, estimate, learn, match_length, mover, step
from jaxlookahead.drafters.suffix_index import COUNT, DEPTH, END, FIRST, LAST, LINK, SHIFT, SuffixIndex

# How fast a request's rate of right copies follows what happens.
RATE = 0.15


class RequestState:
    """The text of a live request, where it stands, and how its copies have gone."""

    def __init__(self, depth: int, namespace: Hashable | None, prompt_length: int) -> None:
        self.index = SuffixIndex(depth)
        self.root = self.index.new_root()
        self.live: list[int] = []
        self.namespace = namespace
        self.prompt_length = prompt_length
        self.rates = [0.5, 0.5]
        self.side: Side | None = None
        self._place: Place | None = None
        self._version = (-1, -1)

    def success(self) -> tuple[int, int]:
        return success_bucket(self.rates[0]), success_bucket(self.rates[1])

    def push(self, token: int) -> None:
        self.live = self.index.push(self.root, self.live, token)

    def take(self, texts: Texts, token: int) -> Texts:
        """Learns from the next token, then appends it; returns `texts` as they are after it."""
        place = self.locate(texts)
        side = self.side
        if side is None or len(side) != len(texts.extras):
            side = (None,) * len(texts.extras)
        right = learn(texts, place, side, token)
        for source in (0, 1):
            if right[source] >= 0:
                self.rates[source] += RATE * (right[source] - self.rates[source])
        if texts.extras:
            self.side = step(texts.extras, side, token)
        self.push(token)
        self._place = self._follow(texts, place, token)
        return texts._replace(success=self.success())

    def locate(self, texts: Texts) -> Place:
        """Where the request stands in both texts."""
        version = (texts.shared.version, texts.shared_root)
        if self._place is None or self._version != version:
            newest = self.index.text[-self.index.depth :]
            node = texts.shared.match(texts.shared_root, newest)
            self._place = (*self._own(texts), *_shared(texts, self.index, node))
            self._version = version
        return self._place

    def _follow(self, texts: Texts, place: Place, token: int) -> Place:
        shared, root = texts.shared, texts.shared_root
        node, length, pointer = place[3:]
        while True:
            child = shared.find(node, token)
            if child or node == root:
                break
            node = shared.nodes[(node << SHIFT) + LINK]
        node = child or root
        if pointer >= 0 and shared.token_at(pointer + 1) == token:
            following = shared.token_at(pointer + 2)
            if 0 <= following != END:
                return (*self._own(texts, place), node, min(length + 1, MAX_MATCH), pointer + 1)
        return (*self._own(texts, place), *_shared(texts, self.index, node))

    def _own(self, texts: Texts, before: Place | None = None) -> tuple[int, int, int]:
        own = self.index
        if texts.own is not own or not self.live:
            return (texts.own_root, 0, -1)
        pointer = own.back
        if pointer < 0:
            return (self.live[-1], 0, -1)
        if before is not None and before[1] and before[2] == pointer - 1:
            length = min(before[1] + 1, MAX_MATCH)
        else:
            length = match_length(own, pointer, own)
        return (self.live[-1], length, pointer if length else -1)


def _shared(texts: Texts, own: SuffixIndex, node: int) -> tuple[int, int, int]:
    shared = texts.shared
    at = node << SHIFT
    length = shared.nodes[at + DEPTH]
    if length and not shared.nodes[at + FIRST]:
        pointer = shared.nodes[at + LAST]
        following = shared.token_at(pointer + 1) if pointer >= 0 else END
        if 0 <= following != END:
            return (node, max(length, match_length(shared, pointer, own)), pointer)
    return (node, length, -1)


class ParentText:
    """The text of a namespace's parent, asked for what the namespace's own text leaves over."""

    name = "parent"
    first = False

    def __init__(
        self,
        nothing: SuffixIndex,
        nothing_root: int,
        shared: SuffixIndex,
        root: int,
        calibration: Calibration,
    ) -> None:
        self._texts = Texts(nothing, nothing_root, shared, root, calibration, (2, 2))
        self._move = mover(self._texts)

    def open(
        self, request: Hashable, namespace: Hashable | None, text: Sequence[int], budget: int, max_depth: int
    ) -> Any:
        shared = self._texts.shared
        node = shared.match(self._texts.shared_root, text[-shared.depth :])
        at = node << SHIFT
        length = shared.nodes[at + DEPTH]
        pointer = -1
        if length and not shared.nodes[at + FIRST] and shared.nodes[at + COUNT]:
            pointer = shared.nodes[at + LAST]
            following = shared.token_at(pointer + 1) if pointer >= 0 else END
            if following < 0 or following == END:
                pointer = -1
        return (self._texts.own_root, 0, -1, node, length, pointer)

    def predict(self, state: Any) -> Sequence[tuple[int, float]]:
        found = estimate(self._texts, state)
        found.pop(END, None)
        return sorted(found.items(), key=lambda item: (-item[1], item[0]))

    def step(self, state: Any, token: int) -> Any:
        return self._move(state, token)

    def end(self, request: Hashable) -> None:
        pass
