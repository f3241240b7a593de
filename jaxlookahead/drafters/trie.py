"""The trie drafter: the request's own text and past text, expanded best first."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from jaxlookahead.drafters.calibration import Calibration, success_bucket
from jaxlookahead.drafters.expansion import Mode, Place, Texts, grow, learn, match_length, mover
from jaxlookahead.drafters.protocol import Draft, DrafterBase
from jaxlookahead.drafters.suffix_index import COUNT, DEPTH, FIRST, LAST, SHIFT, SuffixIndex


class _Request:
    def __init__(self, depth: int, namespace) -> None:
        self.index = SuffixIndex(depth)
        self.root = self.index.new_root()
        self.live: list[int] = []
        self.namespace = namespace
        self.rates = [0.5, 0.5]
        self.prompt_length = 0
        self.place: Place | None = None
        self.version = -1


class TrieDrafter(DrafterBase):
    def __init__(self, *, depth: int = 6, max_nodes: int = 1 << 21, mode: Mode = "tree") -> None:
        self.depth = depth
        self.mode = mode
        self.index = SuffixIndex(depth, max_nodes=max_nodes, shards=509)
        self.roots: dict[Hashable | None, int] = {}
        self.calibrations: dict[Hashable | None, Calibration] = {}
        self.requests: dict[Hashable, _Request] = {}

    def _root(self, namespace):
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = self.index.new_root()
        return root

    def insert(self, tokens: Sequence[int], *, namespace: Hashable | None = None) -> None:
        self.index.add(self._root(namespace), tokens)

    def begin(self, request: Hashable, prompt: Sequence[int], *, namespace: Hashable | None = None) -> None:
        state = self.requests[request] = _Request(self.depth, namespace)
        state.prompt_length = len(prompt)
        for token in prompt:
            state.live = state.index.push(state.root, state.live, token)

    def _texts(self, state: _Request) -> Texts:
        calibration = self.calibrations.get(state.namespace)
        if calibration is None:
            calibration = self.calibrations[state.namespace] = Calibration()
        return Texts(
            state.index,
            state.root,
            self.index,
            self._root(state.namespace),
            calibration,
            (success_bucket(state.rates[0]), success_bucket(state.rates[1])),
        )

    def _place(self, state: _Request, texts: Texts) -> Place:
        own = state.index
        if not own.position:
            return (state.root, 0, -1, texts.shared_root, 0, -1)
        pointer = own.back
        length = match_length(own, pointer, own) if pointer >= 0 else 0
        newest = own.text[-self.depth :]
        node = self.index.match(texts.shared_root, newest)
        nodes = self.index.nodes
        at = node << SHIFT
        shared_length = nodes[at + DEPTH]
        shared_pointer = -1
        if shared_length and not nodes[at + FIRST]:
            shared_pointer = nodes[at + LAST]
            following = self.index.token_at(shared_pointer + 1)
            if following < 0 or following == 1048576:
                shared_pointer = -1
            else:
                shared_length = max(shared_length, match_length(self.index, shared_pointer, own))
        return (state.live[-1], length, pointer if length else -1, node, shared_length, shared_pointer)

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        state = self.requests[request]
        for token in tokens:
            texts = self._texts(state)
            right = learn(texts, self._place(state, texts), token)
            for source in (0, 1):
                if right[source] >= 0:
                    state.rates[source] += 0.15 * (right[source] - state.rates[source])
            state.live = state.index.push(state.root, state.live, token)

    def draft(self, request: Hashable, budget: int, max_depth: int) -> Draft:
        state = self.requests[request]
        texts = self._texts(state)
        return grow(texts, self._place(state, texts), budget, max_depth, self.mode)

    def end(self, request: Hashable, *, remember: bool = True) -> None:
        state = self.requests.pop(request)
        if remember:
            self.insert(state.index.text[state.prompt_length :], namespace=state.namespace)

    def stats(self):
        return {"nodes": self.index.used, "tokens": self.index.position, "bytes": self.index.memory_bytes()}


_ = mover, COUNT
