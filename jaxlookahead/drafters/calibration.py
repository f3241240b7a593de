"""How far to trust a prediction: weights learnt online, per source and match length.

The next-token estimate is a mixture built by stick breaking: the predictions are put in order, longest
context first; each takes its share `weight` of what the ones before it have left over. So a weight is the
probability that a prediction of this kind is the right one to believe, given that no longer one was. The
weights are learnt by online expectation maximisation from every token the model emits: the share of a weight
in the token's probability is the evidence for it (Jelinek and Mercer's deleted interpolation, with buckets).

Two kinds of prediction exist, for the request's own text and for shared text each. A *copy* reads the token
that followed the latest occurrence of the longest match; its bucket is the length of the match, how often the
context occurred, how rare its last token is, and how well copies have gone in this request. A *context* gives
the counts of what followed it; its bucket is its length, its number of occurrences, and how many of these the
likeliest token missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

REQUEST, SHARED = 0, 1
LENGTHS, UNIQUENESS, RARITY, SUCCESS = 15, 5, 5, 4
DEPTHS, TOTALS, MISSES = 9, 10, 5
COPIES = LENGTHS * UNIQUENESS * RARITY * SUCCESS
CONTEXTS = DEPTHS * TOTALS * MISSES
MAX_MATCH = 48


def _buckets(edges: tuple[int, ...]) -> list[int]:
    return [sum(n >= edge for edge in edges) for n in range(edges[-1] + 1)]


LENGTH_BUCKET = _buckets((1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 36, MAX_MATCH))
LENGTH_BUCKET += [LENGTHS - 1] * 2048
TOTAL_BUCKET = _buckets((1, 2, 3, 4, 5, 7, 11, 19, 35))
TOTAL_BUCKET += [TOTALS - 1] * 64
MISS_BUCKET = _buckets((1, 2, 4, 12))
MISS_BUCKET += [MISSES - 1] * 64
LAST_TOTAL = len(TOTAL_BUCKET) - 1
LAST_MISS = len(MISS_BUCKET) - 1

_COPY_START = (0.0, 0.22, 0.3, 0.33, 0.38, 0.45, 0.52, 0.6, 0.7, 0.78, 0.84, 0.88, 0.92, 0.95, 0.97)
_SUCCESS_START = (0.6, 0.85, 1.0, 1.25)
EXTRA_START = 0.3
SLOWEST = 0.005
LEAST = 1e-3
# Bins of path probability for the last correction, the nodes they start with, and when they forget half.
BINS = 20
PRIOR = 20.0
MOST = 100.0


# The same, multiplied out: an index into the weights is a sum of one entry each.
LENGTH_BASE = [bucket * UNIQUENESS * RARITY * SUCCESS for bucket in LENGTH_BUCKET]
RARITY_STEP = SUCCESS
UNIQUENESS_STEP = RARITY * SUCCESS
DEPTH_BASE = [min(depth, DEPTHS - 1) * TOTALS * MISSES for depth in range(64)]
TOTAL_BASE = [bucket * MISSES for bucket in TOTAL_BUCKET]


def success_bucket(rate: float) -> int:
    """The bucket of a request's recent rate of right copies."""
    return 3 if rate > 0.75 else 2 if rate > 0.5 else 1 if rate > 0.25 else 0


def rarity_bucket(count: int, total: int) -> int:
    """The bucket of a token seen `count` times in `total` tokens of shared text."""
    total += 100
    return 1 + (count * 20000 > total) + (count * 2000 > total) + (count * 200 > total)


def uniqueness_bucket(count: int, leaf: bool) -> int:
    """The bucket of a context seen `count` times; of a `leaf` only the latest continuation is known."""
    if count < 2:
        return 0
    if leaf:
        return 4
    return 1 if count < 3 else 2 if count < 6 else 3


class Calibration:
    """Weights of all kinds of prediction.

    Attributes:
      copy: weights of copies, request's then shared.
      context: weights of contexts, request's then shared.
      copy_seen: number of updates of each weight of `copy`.
      context_seen: likewise.
      estimated: sums of the estimated path probabilities of verified nodes, by bin.
      accepted: numbers of those nodes that were accepted, by bin.
      extra: `([weight], [updates])` of every further source by name.
    """

    def __init__(self) -> None:
        one = [
            min(_COPY_START[length] * _SUCCESS_START[success], 0.97)
            for length in range(LENGTHS)
            for _ in range(UNIQUENESS * RARITY)
            for success in range(SUCCESS)
        ]
        self.copy = one + one
        self.context = [0.5] * CONTEXTS + [0.4] * CONTEXTS
        self.copy_seen = [0] * (2 * COPIES)
        self.context_seen = [0] * (2 * CONTEXTS)
        self.estimated = [PRIOR] * (BINS + 1)
        self.accepted = [PRIOR] * (BINS + 1)
        self._ratio = [1.0] * (BINS + 2)
        self.extra: dict[str, tuple[list[float], list[int]]] = {}

    def extra_weight(self, name: str, start: float = EXTRA_START) -> tuple[list[float], list[int]]:
        """`([weight], [updates])` of a further source, which begins with the weight `start`."""
        found = self.extra.get(name)
        if found is None:
            found = self.extra[name] = ([start], [0])
        return found

    def learn(self, sticks: list[tuple[list[float], list[Any], int, float]], rest: float) -> None:
        """Updates the weights behind one token's probability.

        Args:
          sticks: `(weights, updates, index, part)` in the order of the mixture, `part` being what this
            prediction added to the probability of the token that came.
          rest: the probability left for everything else.
        """
        left = whole = rest + sum(part for _, _, _, part in sticks)
        if whole <= 0.0:
            return
        for weights, seen, index, part in sticks:
            # The update counts for as much as it is likely that no longer prediction was the right one.
            n = seen[index] = seen[index] + 1
            rate = 1.0 / (n + 4)
            weight = weights[index]
            weight += (rate if rate > SLOWEST else SLOWEST) * (part - left * weight) / whole
            # At 0 or 1 it could never change again.
            weights[index] = min(max(weight, LEAST), 1.0 - LEAST)
            left -= part

    def corrected(self, probs: Sequence[float], parents: Sequence[int]) -> list[float]:
        """Path probabilities as they have turned out, from path probabilities as estimated.

        Args:
          probs: estimated probabilities of a draft's nodes.
          parents: the draft's parents; no node gets more than its parent.
        """
        ratio = self._ratio
        found: list[float] = []
        for prob, parent in zip(probs, parents, strict=True):
            place = prob * BINS
            low = int(place)
            here = ratio[low]
            value = prob * (here + (ratio[low + 1] - here) * (place - low))
            most = found[parent] if parent >= 0 else 1.0
            found.append(value if value < most else most)
        return found

    def verified(self, probs: list[float], accepted: Sequence[int]) -> None:
        """Learns which of the nodes with these estimated path probabilities were accepted."""
        on_path = set(accepted)
        for node, prob in enumerate(probs):
            bucket = int(prob * BINS + 0.5)
            self.estimated[bucket] += prob
            if node in on_path:
                self.accepted[bucket] += 1.0
        self.settle({int(prob * BINS + 0.5) for prob in probs})

    def settle(self, buckets: Iterable[int] = range(BINS + 1)) -> None:
        """Brings the correction of some bins up to date."""
        for bucket in buckets:
            if self.estimated[bucket] > MOST:
                self.estimated[bucket] /= 2.0
                self.accepted[bucket] /= 2.0
            self._ratio[bucket] = self.accepted[bucket] / self.estimated[bucket]
