"""The one interface between drafting and decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

if TYPE_CHECKING:
    from jaxlookahead.sampling.params import Sampling
    from jaxlookahead.stochastic_rule import Proposal


@dataclasses.dataclass(slots=True)
class Draft:
    """A tree of guesses for the tokens that follow a request's newest token.

    Node `i` guesses `tokens[i]` after the path that ends at node `parents[i]`; parent -1 means directly after the
    newest token. Parents come before their children and no two children of a node hold the same token. The order of
    nodes is the order of worth: whoever must shorten a draft drops nodes from the end.

    Attributes:
      tokens: token ids.
      parents: indices into this draft, -1 for the newest token of the request.
      probs: estimated probability that the node is accepted (of the whole path, not of the edge), or None.
      sources: name of the source that proposed each node, or None.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    parents: list[int] = dataclasses.field(default_factory=list)
    probs: list[float] | None = None
    sources: list[str] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@runtime_checkable
class Drafter(Protocol):
    """What `generate` asks of a source of drafts. All calls for a drafter come from one thread at a time.

    A request lives from `begin` to `end`. Several requests may be alive at once. What a drafter answers must be a
    function of the calls made to it: no clock, no hash order, no random numbers that are not seeded, so that every
    process of a multi-host run drafts the same.
    """

    def begin(self, request: Hashable, prompt: Sequence[int], *, namespace: Hashable | None = None) -> None:
        """Starts a request. `prompt` is its token ids, its last token is the first newest token.

        `namespace` separates memories shared across requests (a tenant, a prompt id); None is the common one.
        """

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        """Tells the tokens that the model emitted for `request`, in order; the last one is now the newest token."""

    def draft(self, request: Hashable, budget: int, max_depth: int) -> Draft:
        """Proposes at most `budget` nodes, none deeper than `max_depth` (children of the newest token have depth 1)."""

    def verified(self, request: Hashable, draft: Draft, accepted: Sequence[int]) -> None:
        """Tells what became of `draft`: the indices of its accepted nodes, a path from a child of the newest token
        downwards. Called before the `extend` of the same step. `draft` may be shorter than what was proposed."""

    def end(self, request: Hashable, *, remember: bool = True) -> None:
        """Ends a request and frees its private state; with `remember` its response joins the shared memory."""

    def idle(self) -> None:
        """Called while the device works on a step: the place for work that need not finish before the next draft."""


class SamplingDrafter(Drafter, Protocol):
    """A drafter that wants to know how its requests choose their tokens."""

    def begin_sampling(self, request: Hashable, sampling: Sampling, request_id: int) -> None:
        """Called after the `begin` of a request that samples; `request_id` is the `r` of its noise."""


class TopkDrafter(Drafter, Protocol):
    """A drafter that learns from what the model finds likely.

    Attributes:
      wants_topk: how many tokens; 0 for none.
    """

    @property
    def wants_topk(self) -> int: ...

    def observe_topk(self, request: Hashable, tokens: Sequence[int], topk: Sequence[Sequence[int]]) -> None:
        """Tells the model's likeliest next tokens, likeliest first, after each of the verified `tokens`."""


def topk_drafter(drafter: Drafter | None) -> TopkDrafter | None:
    """The drafter, if it wants to observe what the model finds likely."""
    # Asked for by name, not by protocol: a drafter may pass on to another one what it lacks.
    return cast(TopkDrafter, drafter) if getattr(drafter, "wants_topk", 0) else None


class StochasticDrafter(Drafter, Protocol):
    """A drafter that may draw its drafts by chance, to be accepted by chance.

    Attributes:
      stochastic: whether it does.
      vocab_size: `V` of the distributions it draws from; must be the model's.
    """

    @property
    def stochastic(self) -> bool: ...

    @property
    def vocab_size(self) -> int | None: ...

    def proposal(self, requests: Sequence[Hashable | None]) -> Proposal:
        """What the latest drafts of the requests, one for each row of a step, were drawn from."""


class DrafterBase:
    """No-op defaults for the optional calls of `Drafter`."""

    def verified(self, request: Hashable, draft: Draft, accepted: Sequence[int]) -> None:
        """See `Drafter`."""
        del request, draft, accepted

    def idle(self) -> None:
        """See `Drafter`."""
