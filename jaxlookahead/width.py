"""How wide a tree to verify: the width with the most expected tokens per second, by measured cost."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Collection, Sequence

from jaxlookahead.drafters.protocol import Draft

# Tokens scored in the time that one read of the weights takes, where nothing was measured yet.
_FREE_TOKENS = {"cpu": 8, "gpu": 300, "tpu": 240}
_MAX_WIDTH = {"cpu": 16, "gpu": 64, "tpu": 64}
_WINDOW = 9
_UNKNOWN_PROB = 0.3
# A draft that is right once in fifty is tried again after some three hundred steps: about one try in ten steps then.
_FADING = 0.001


def buckets(width: int) -> list[int]:
    """The widths that are compiled: powers of two, and `width` itself."""
    powers = [1 << i for i in range((width - 1).bit_length())]
    return [*powers, width]


def free_tokens(platform: str) -> int:
    """See `_FREE_TOKENS`; accelerators of other names count as GPUs."""
    return _FREE_TOKENS.get(platform, _FREE_TOKENS["gpu"])


def default_width(platform: str) -> int:
    """The widest tree that is tried where nobody says otherwise."""
    return _MAX_WIDTH.get(platform, _MAX_WIDTH["gpu"])


class CostTable:
    """Seconds of a step by width, for one cache size: medians of what was measured, a straight line elsewhere."""

    def __init__(self, free_tokens: int) -> None:
        """
        Args:
          free_tokens: the prior: a step of `n` tokens in all costs `1 + n / free_tokens` units.
        """
        self._free_tokens = free_tokens
        self._seconds: dict[int, collections.deque[float]] = {}

    def add(self, tokens: int, seconds: float) -> None:
        """Records a step over `tokens` tokens in all rows."""
        self._seconds.setdefault(tokens, collections.deque(maxlen=_WINDOW)).append(seconds)

    def estimate(self, tokens: int) -> float:
        """Seconds of a step over `tokens` tokens; in arbitrary units before anything was measured."""
        known = {size: statistics.median(list(times)) for size, times in list(self._seconds.items())}
        if tokens in known:
            return known[tokens]

        def prior(size: int) -> float:
            return 1 + size / self._free_tokens

        if not known:
            return prior(tokens)
        nearest = min(known, key=lambda size: (abs(size.bit_length() - tokens.bit_length()), size))
        return known[nearest] * prior(tokens) / prior(nearest)


class Acceptance:
    """How often the nodes of drafts without probabilities are accepted, by their place in the draft."""

    def __init__(self) -> None:
        self._nodes: list[tuple[float, float]] = []

    def learn(self, nodes: int, accepted: Collection[int]) -> None:
        """Learns what became of a draft of `nodes` nodes."""
        self._nodes.extend([(_UNKNOWN_PROB, 1.0)] * (nodes - len(self._nodes)))
        for node in range(nodes):
            good, tried = self._nodes[node]
            # An exponential average over some fifty steps forgets a bad patch.
            self._nodes[node] = (0.98 * good + (node in accepted), 0.98 * tried + 1)

    def pass_over(self, first: int, nodes: int) -> None:
        """Notes that a draft of `nodes` nodes was cut before node `first`: what was learnt of the rest fades slowly,
        so that it is tried again."""
        for node in range(first, min(nodes, len(self._nodes))):
            good, tried = self._nodes[node]
            self._nodes[node] = (good + _FADING * (_UNKNOWN_PROB * tried - good), tried)

    def probs(self, nodes: int) -> list[float]:
        """The estimate for each node of a draft of `nodes` nodes."""
        learnt = [good / tried for good, tried in self._nodes[:nodes]]
        return learnt + [_UNKNOWN_PROB * 0.8**i for i in range(len(learnt), nodes)]


class Costs:
    """Measured step times of one model, by cache size. Shared by all calls of `generate` for the model.

    Attributes:
      acceptance: what was learnt of drafters that give no probabilities, by their name.
    """

    def __init__(self, free_tokens: int) -> None:
        """`free_tokens`: see `CostTable`."""
        self._free_tokens = free_tokens
        self._tables: dict[int, CostTable] = {}
        self._compiled: set[tuple[int, int, int]] = set()
        self.acceptance: collections.defaultdict[str, Acceptance] = collections.defaultdict(Acceptance)

    def table(self, slots: int) -> CostTable:
        """The costs at one cache size."""
        return self._tables.setdefault(slots, CostTable(self._free_tokens))

    def measured(self, rows: int, width: int, slots: int, seconds: float) -> None:
        """Records the time of a step. The first of each shape, which compiles, does not count."""
        shape = (rows, width, slots)
        if shape in self._compiled:
            self.table(slots).add(rows * width, seconds)
        self._compiled.add(shape)


class WidthController:
    """Chooses the width of each step.

    The gain of a width is one token for each row and the probability, summed, that the nodes which fit are accepted;
    the cost is the measured time of steps of that width. A drafter that gives no probabilities has them learnt, for
    the calls after this one too, by the place of a node in its draft.
    """

    def __init__(self, max_width: int, costs: Costs, kind: str = "") -> None:
        """
        Args:
          max_width: the widest step.
          costs: of the model.
          kind: name of the drafter's kind, under which the acceptance of its drafts is kept.
        """
        self.widths = buckets(max_width)
        self.costs = costs
        self._last = max_width
        self._acceptance = costs.acceptance[kind]

    @property
    def reach(self) -> int:
        """How wide drafts are worth making: two widths above the last choice, so that it may rise."""
        return min(4 * self._last, self.widths[-1])

    def choose(self, drafts: Sequence[Draft | None], slots: int) -> int:
        """The best width.

        Args:
          drafts: what was proposed for each row, None for an empty row.
          slots: cache size, which the cost depends on.
        """
        rows = len(drafts)
        costs = self.costs.table(slots)
        probs = [self._probs(draft) for draft in drafts if draft is not None]
        widest = 1 + max((len(p) for p in probs), default=0)
        best, best_rate = 1, 0.0
        for width in self.widths:
            gain = sum(1 + sum(p[: width - 1]) for p in probs)
            rate = gain / costs.estimate(rows * width)
            if rate > best_rate:
                best, best_rate = width, rate
            if width >= widest:
                break
        for draft in drafts:
            if draft is not None and draft.probs is None:
                self._acceptance.pass_over(best - 1, len(draft))
        self._last = best
        return best

    def verified(self, draft: Draft, accepted: Sequence[int]) -> None:
        """Learns from what became of a draft."""
        if draft.probs is None:
            self._acceptance.learn(len(draft), set(accepted))

    def _probs(self, draft: Draft) -> Sequence[float]:
        return self._acceptance.probs(len(draft)) if draft.probs is None else draft.probs
