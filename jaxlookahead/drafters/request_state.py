"""What the trie drafter keeps for one live request."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from jaxlookahead.drafters.calibration import MAX_MATCH, Calibration, success_bucket
from jaxlookahead.drafters.estimates import Place, Side, Texts, estimate, learn, match_length, mover, step
from jaxlookahead.drafters.sources import Source
from jaxlookahead.drafters.suffix_index import DEPTH, END, FIRST, LAST, LINK, SHIFT, SuffixIndex

# Tokens looked back at to find a place anew.
WINDOW = 24
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
        self.asked: tuple[str, ...] = ()
        self.estimated: list[float] = []
        self.topk: Sequence[Sequence[int]] = ()
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
        # Siblings come and go between a draft and what came of it.
        names = tuple(source.name for source in texts.extras)
        if side is None or self.asked != names:
            side, self.asked = (None,) * len(texts.extras), names
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
            self._place = (*self._own(texts), *search(texts.shared, texts.shared_root, self.index.text))
            self._version = version
        return self._place

    def _follow(self, texts: Texts, place: Place, token: int) -> Place:
        return (*self._own(texts, place), *_step(texts.shared, texts.shared_root, place[3:], token))

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


def search(shared: SuffixIndex, root: int, text: Sequence[int]) -> tuple[int, int, int]:
    """Where the end of `text` is found below a root: the node, length and pointer of a place."""
    found = (root, 0, -1)
    for token in text[-WINDOW:]:
        found = _step(shared, root, found, token)
    return found


def _step(shared: SuffixIndex, root: int, found: tuple[int, int, int], token: int) -> tuple[int, int, int]:
    node, length, pointer = found
    while True:
        child = shared.find(node, token)
        if child or node == root:
            break
        node = shared.nodes[(node << SHIFT) + LINK]
    node = child or root
    # A string that has occurred once has no node, so a copy is followed in the text.
    if pointer >= 0 and shared.token_at(pointer + 1) == token:
        pointer += 1
        length = min(length + 1, MAX_MATCH)
    else:
        at = node << SHIFT
        length = shared.nodes[at + DEPTH]
        pointer = shared.nodes[at + LAST] if length and not shared.nodes[at + FIRST] else -1
    if pointer >= 0 and not 0 <= shared.token_at(pointer + 1) < END:
        pointer = -1
    return node, length, pointer


class ParentText(Source):
    """The text of a namespace's parent, asked for what the namespace's own text leaves over."""

    name = "parent"

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
        # Text may go in, or go, between a draft and the tokens that come of it; nodes of then may be anything by now.
        self._version = (shared.version, root)

    def open(
        self, request: Hashable, namespace: Hashable | None, text: Sequence[int], budget: int, max_depth: int
    ) -> Any:
        found = search(self._texts.shared, self._texts.shared_root, text)
        return self._version, (self._texts.own_root, 0, -1, *found)

    def predict(self, state: Any) -> Sequence[tuple[int, float]]:
        version, place = state
        if version != self._version:
            return ()
        found = estimate(self._texts, place)
        found.pop(END, None)
        return sorted(found.items(), key=lambda item: (-item[1], item[0]))

    def step(self, state: Any, token: int) -> Any:
        version, place = state
        return (version, self._move(place, token)) if version == self._version else None
