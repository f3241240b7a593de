"""A drafter that keeps what another one drafted, and what became of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Hashable, Sequence
from typing import Any

from jaxlookahead.drafters.protocol import Draft, Drafter
from jaxlookahead.drafters.registry import make_drafter


@dataclasses.dataclass
class Step:
    """What happened to one request in one step.

    Attributes:
      request: the request's number, from 0 in the order of their beginnings.
      root: the newest token, which the draft follows.
      draft: the tree that was verified.
      accepted: indices of its accepted nodes, from the top down.
      tokens: what the step emitted, accepted tokens first.
      seconds: since the recorder was made.
    """

    request: int
    root: int
    draft: Draft
    accepted: list[int]
    tokens: list[int]
    seconds: float

    def depths(self) -> list[int]:
        """Depth of each node of the draft, from 1."""
        out: list[int] = []
        for parent in self.draft.parents:
            out.append(1 if parent < 0 else out[parent] + 1)
        return out


class Recorder:
    """Passes every call on to a drafter and records the steps, for `plot_tree`, `plot_acceptance` and `plot_run`.

    What the drafter has beyond the protocol (`save`, `stats`, ...) is reached through the recorder too.

    Attributes:
      drafter: the drafter.
      steps: what was recorded, oldest first.
    """

    def __init__(self, drafter: Drafter | str = "trie", *, max_steps: int = 100_000) -> None:
        """
        Args:
          drafter: a name or an object, as `generate` takes it.
          max_steps: steps kept; later ones are not recorded.

        Raises:
          ValueError: there is nothing to record.
        """
        made = make_drafter(drafter)
        if made is None:
            raise ValueError("drafter=None drafts nothing that could be recorded")
        self.drafter: Drafter = made
        self.max_steps = max_steps
        self.steps: list[Step] = []
        self._start = time.perf_counter()
        self._begun = 0
        self._live: dict[Hashable, tuple[int, int]] = {}  # number, newest token
        self._open: dict[Hashable, tuple[Draft, list[int]]] = {}

    def begin(self, request: Hashable, prompt: Sequence[int], *, namespace: Hashable | None = None) -> None:
        """See `Drafter`."""
        self.drafter.begin(request, prompt, namespace=namespace)
        self._live[request] = (self._begun, int(prompt[-1]))
        self._begun += 1

    def draft(self, request: Hashable, budget: int, max_depth: int) -> Draft:
        """See `Drafter`."""
        return self.drafter.draft(request, budget, max_depth)

    def verified(self, request: Hashable, draft: Draft, accepted: Sequence[int]) -> None:
        """See `Drafter`."""
        self.drafter.verified(request, draft, accepted)
        self._open[request] = (draft, list(accepted))

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        self.drafter.extend(request, tokens)
        emitted = [int(token) for token in tokens]
        number, newest = self._live[request]
        if request in self._open and len(self.steps) < self.max_steps:
            draft, accepted = self._open.pop(request)
            seconds = time.perf_counter() - self._start
            self.steps.append(Step(number, newest, draft, accepted, emitted, seconds))
        if emitted:
            self._live[request] = (number, emitted[-1])

    def end(self, request: Hashable, *, remember: bool = True) -> None:
        """See `Drafter`."""
        self._live.pop(request, None)
        self._open.pop(request, None)
        self.drafter.end(request, remember=remember)

    def idle(self) -> None:
        """See `Drafter`."""
        self.drafter.idle()

    def __getattr__(self, name: str) -> Any:
        if name == "drafter":  # not there yet, as when copied
            raise AttributeError(name)
        return getattr(self.drafter, name)
