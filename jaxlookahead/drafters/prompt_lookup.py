"""Prompt lookup decoding: copy what followed an earlier occurrence of the newest n-gram."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Literal, get_args

from jaxlookahead.drafters.protocol import Draft, DrafterBase

Match = Literal["latest", "earliest", "most_frequent"]
Short = Literal["keep", "skip", "longest", "wrap"]


class _Text:
    """The tokens of one request and, for every n-gram in it, the positions that follow its occurrences."""

    __slots__ = ("followers", "tokens")

    def __init__(self, orders: int) -> None:
        self.tokens: list[int] = []
        self.followers: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(orders)]


class PromptLookup(DrafterBase):
    """Drafts one branch from the request's own prompt and output.

    The newest `max_ngram` tokens are searched for in the text before them; where there is no earlier
    occurrence, the newest `max_ngram - 1` are, and so on down to `min_ngram`. What followed the occurrence is
    the draft.

    After "Prompt Lookup Decoding" (A. Saxena, 2023).
    """

    def __init__(
        self,
        max_ngram: int = 3,
        min_ngram: int = 1,
        *,
        length: int = 10,
        match: Match = "latest",
        short: Short = "keep",
        eos_ids: Collection[int] = (),
    ) -> None:
        """
        Args:
          max_ngram: the longest n-gram that is searched for.
          min_ngram: the shortest one.
          length: the most tokens in a draft; budget and depth of a call may lower it.
          match: which of several occurrences of the longest matching n-gram to copy from: the `latest`, the
            `earliest`, or the latest one of those with the `most_frequent` next token.
          short: what to do about an occurrence with fewer tokens after it than asked for: `keep` drafts those
            few, `skip` ignores it (there may be a shorter n-gram's), `longest` takes an occurrence with
            enough tokens if there is one and otherwise the one with most, `wrap` lets the copy go on into the
            draft itself, which repeats a loop as often as asked.
          eos_ids: tokens after which nothing is drafted.

        Raises:
          ValueError: an option has no meaning.
        """
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram, got min_ngram={min_ngram}, max_ngram={max_ngram}")
        if length < 1:
            raise ValueError(f"length={length} must be at least 1")
        if match not in get_args(Match):
            raise ValueError(f"match={match!r} must be one of {', '.join(get_args(Match))}")
        if short not in get_args(Short):
            raise ValueError(f"short={short!r} must be one of {', '.join(get_args(Short))}")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.length = length
        self.match = match
        self.short = short
        self.eos_ids = frozenset(eos_ids)
        self._texts: dict[Hashable, _Text] = {}

    def begin(self, request: Hashable, prompt: Sequence[int], *, namespace: Hashable | None = None) -> None:
        """See `Drafter`."""
        del namespace
        if request in self._texts:
            raise ValueError(f"request {request!r} has begun already: end it first")
        self._texts[request] = _Text(self.max_ngram)
        self.extend(request, prompt)

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        text = self._text(request)
        seen = text.tokens
        for token in tokens:
            end = len(seen)
            for n in range(self.min_ngram, min(self.max_ngram, end) + 1):
                gram = tuple(seen[end - n : end])
                positions = text.followers[n - 1].get(gram)
                if positions is None:
                    text.followers[n - 1][gram] = [end]
                else:
                    positions.append(end)
            seen.append(int(token))

    def draft(self, request: Hashable, budget: int, max_depth: int) -> Draft:
        """See `Drafter`."""
        text = self._text(request)
        want = min(budget, max_depth, self.length)
        if want < 1:
            return Draft()
        seen = text.tokens
        for n in range(min(self.max_ngram, len(seen)), self.min_ngram - 1, -1):
            positions = text.followers[n - 1].get(tuple(seen[-n:]))
            start = self._choose(seen, positions, want) if positions else None
            if start is not None:
                return self._copy(seen, start, want)
        return Draft()

    def end(self, request: Hashable, *, remember: bool = True) -> None:
        """See `Drafter`."""
        del remember
        self._text(request)
        del self._texts[request]

    def _text(self, request: Hashable) -> _Text:
        try:
            return self._texts[request]
        except KeyError:
            raise KeyError(f"request {request!r} has not begun or has ended: call begin first") from None

    def _choose(self, seen: list[int], positions: list[int], want: int) -> int | None:
        """The position to copy from, or None where `short` forbids all of them."""
        if self.match == "most_frequent":
            counts: dict[int, int] = {}
            for position in positions:
                counts[seen[position]] = counts.get(seen[position], 0) + 1
            best = max(counts.values())
            positions = [position for position in positions if counts[seen[position]] == best]
            newest = seen[positions[-1]]
            positions = [position for position in positions if seen[position] == newest]
        ordered = positions if self.match == "earliest" else positions[::-1]
        if self.short in ("keep", "wrap"):
            return ordered[0]
        for position in ordered:
            if len(seen) - position >= want:
                return position
        return min(positions) if self.short == "longest" else None

    def _copy(self, seen: list[int], start: int, want: int) -> Draft:
        tokens = seen[start : start + want]
        if self.short == "wrap":
            # An overlapping copy, as in LZ77: the period is the distance from the occurrence to the end.
            period = len(seen) - start
            while len(tokens) < want:
                tokens.append(tokens[len(tokens) - period])
        for i, token in enumerate(tokens):
            if token in self.eos_ids:
                tokens = tokens[: i + 1]
                break
        return Draft(tokens=tokens, parents=list(range(-1, len(tokens) - 1)))
