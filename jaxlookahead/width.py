"""How wide a tree to verify: the width with the most expected tokens per second, by measured cost."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence

from jaxlookahead.drafters.protocol import Draft

# Tokens scored in the time that one read of the weights takes, where nothing was measured yet.
_FREE_TOKENS = {"cpu": 8, "gpu": 300, "tpu": 240}
_MAX_WIDTH = {"cpu": 16, "gpu": 64, "tpu": 64}
_WINDOW = 9
_UNKNOWN_PROB = 0.3


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


class Costs:
    """Measured step times of one model, by cache size. Shared by all calls of `generate` for the model."""

    def __init__(self, free_tokens: int) -> None:
        """`free_tokens`: see `CostTable`."""
        self._free_tokens = free_tokens
        self._tables: dict[int, CostTable] = {}
        self._compiled: set[tuple[int, int, int]] = set()

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
    the cost is the measured time of steps of that width. A drafter that gives no probabilities has them learnt here,
    by the place of a node in its draft.
    """

    def __init__(self, max_width: int, costs: Costs) -> None:
        self.widths = buckets(max_width)
        self.costs = costs
        self._accepted: list[tuple[float, float]] = []

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
        return best

    def verified(self, draft: Draft, accepted: Sequence[int]) -> None:
        """Learns from what became of a draft."""
        if draft.probs is not None:
            return
        hit = set(accepted)
        self._accepted.extend([(_UNKNOWN_PROB, 1.0)] * (len(draft) - len(self._accepted)))
        for node in range(len(draft)):
            good, tried = self._accepted[node]
            # An exponential average over some fifty steps forgets a bad patch.
            self._accepted[node] = (0.98 * good + (node in hit), 0.98 * tried + 1)

    def _probs(self, draft: Draft) -> Sequence[float]:
        if draft.probs is not None:
            return draft.probs
        learnt = [good / tried for good, tried in self._accepted[: len(draft)]]
        return learnt + [_UNKNOWN_PROB * 0.8**i for i in range(len(learnt), len(draft))]
