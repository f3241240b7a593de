"""Jacobi guesses: what the model said along branches that were not accepted."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from jaxlookahead.drafters.protocol import Draft
from jaxlookahead.drafters.sources import Source

Tail = tuple[int, ...]


@dataclasses.dataclass
class _Guesses:
    """Of one request.

    Attributes:
      newest: the newest tokens, fewer than an n-gram has.
      ahead: guesses for the positions after the newest token.
      tails: n-grams by first token, without it, oldest first.
    """

    newest: list[int]
    ahead: list[int] = dataclasses.field(default_factory=list)
    tails: dict[int, dict[Tail, None]] = dataclasses.field(default_factory=dict)

    def starting(self, token: int) -> list[Tail]:
        return list(reversed(self.tails.get(token, {})))


class _State(NamedTuple):
    """Where a path stands: the guesses that still lie ahead of it, and the n-grams that go on from it."""

    guesses: _Guesses
    ahead: Sequence[int]
    tails: list[Tail]


class GuessPool(Source):
    """Guesses that every call refines, as lookahead decoding does, and the n-grams that come of it.

    After "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (Fu et al., 2024), without
    queries of its own: the branches of the draft that are not accepted are the window. The model's likeliest token
    after each of their nodes is the next guess for the position after that node (a step of Jacobi iteration),
    and closes an n-gram of the pool. The pool holds the newest few for each first token. Guesses are kept per request.

    Off unless given to `TrieDrafter(sources=[GuessPool()])`; the step then returns the likeliest token of every node.
    """

    name = "guesses"
    wants_topk = 1

    def __init__(self, per_token: int = 8, ngram: int = 4) -> None:
        """
        Args:
          per_token: n-grams kept for each first token.
          ngram: length of the n-grams taken from verified drafts, at least 2.
        """
        if per_token < 1:
            raise ValueError(f"per_token={per_token} must be at least 1")
        if ngram < 2:
            raise ValueError(f"ngram={ngram} must be at least 2")
        self.per_token = per_token
        self.ngram = ngram
        self._requests: dict[Hashable, _Guesses] = {}

    def begin(self, request: Hashable, prompt: Sequence[int], namespace: Hashable | None) -> None:
        del namespace
        self._requests[request] = _Guesses(list(prompt[1 - self.ngram :]))

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        found = self._requests[request]
        found.newest = [*found.newest, *tokens][1 - self.ngram :]
        found.ahead = found.ahead[len(tokens) :]

    def end(self, request: Hashable, remember: bool) -> None:
        del remember
        self._requests.pop(request, None)

    def observe(self, request: Hashable, ngram: Sequence[int]) -> None:
        """Adds an n-gram of at least two tokens to a request's pool."""
        if len(ngram) < 2:
            return
        head, *tail = (int(token) for token in ngram)
        tails = self._requests[request].tails.setdefault(head, {})
        tails.pop(tuple(tail), None)
        tails[tuple(tail)] = None
        if len(tails) > self.per_token:
            del tails[next(iter(tails))]

    def verified(self, request: Hashable, draft: Draft, accepted: Sequence[int], topk: Sequence[Sequence[int]]) -> None:
        if not topk:
            return
        guesses = self._requests[request]
        kept = set(accepted)
        paths: list[list[int]] = []
        children: dict[int, list[int]] = {}
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            above = paths[parent] if parent >= 0 else guesses.newest
            paths.append([*above, token][1 - self.ngram :])
            children.setdefault(parent, []).append(node)
            # What was accepted is the request's own text from now on.
            if node not in kept:
                self.observe(request, [*paths[node], topk[node + 1][0]])
        # The positions that this step emits, then those that a rejected branch reaches: the guesses themselves
        # where they were drafted, the likeliest branch elsewhere.
        node = accepted[-1] if len(accepted) else -1
        refined: list[int] = []
        place = len(accepted)
        while node in children:
            wanted = guesses.ahead[place] if place < len(guesses.ahead) else None
            node = next((child for child in children[node] if draft.tokens[child] == wanted), children[node][0])
            refined.append(topk[node + 1][0])
            place += 1
        emitted = len(accepted) + 1
        passed = (guesses.ahead + [0] * emitted)[:emitted]
        # Any guess will do to begin with: the newest tokens over again.
        guesses.ahead = passed + (refined + guesses.ahead[emitted + len(refined) :] or guesses.newest)

    def open(
        self, request: Hashable, namespace: Hashable | None, text: Sequence[int], budget: int, max_depth: int
    ) -> Any:
        del namespace, text, budget, max_depth
        guesses = self._requests[request]
        if not guesses.tails and not guesses.ahead:
            return None
        tails: list[Tail] = []
        for token in guesses.newest:
            tails = _follow(guesses, tails, token)
        return _State(guesses, guesses.ahead, tails)

    def predict(self, state: _State) -> Sequence[tuple[int, float]]:
        shares: dict[int, float] = {}
        weight = 0.5
        for token in (*state.ahead[:1], *(tail[0] for tail in state.tails)):
            shares[token] = shares.get(token, 0.0) + weight
            weight *= 0.5
        return sorted(shares.items(), key=lambda item: -item[1])

    def step(self, state: _State, token: int) -> _State:
        ahead = state.ahead[1:] if state.ahead and state.ahead[0] == token else ()
        return _State(state.guesses, ahead, _follow(state.guesses, state.tails, token))


def _follow(guesses: _Guesses, tails: list[Tail], token: int) -> list[Tail]:
    """The n-grams that go on after `token`: those already begun first, then those it begins, newest first."""
    return [tail[1:] for tail in tails if tail[0] == token and len(tail) > 1] + guesses.starting(token)
