"""Further sources of next tokens, which the trie drafter expands together with its own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jaxlookahead.drafters.calibration import EXTRA_START
from jaxlookahead.drafters.protocol import Draft, Drafter, DrafterBase


class Source:
    """One more opinion on which tokens may follow a path; the base class of all.

    How far it is trusted is learnt online, under its name, from the tokens that the model emits.

    Attributes:
      name: what it is called in statistics and labels.
      first: whether it is asked before the request's own and shared text, or for what these leave over.
      start: how far it is trusted at first, from 0 to 1.
      wants_topk: how many of the model's likeliest next tokens after every verified node `verified` should have.
    """

    name: str
    first: bool = False
    start: float = EXTRA_START
    wants_topk: int = 0

    def begin(self, request: Hashable, prompt: Sequence[int], namespace: Hashable | None) -> None:
        """A request starts."""

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        """A request goes on with tokens that the model emitted."""

    def verified(self, request: Hashable, draft: Draft, accepted: Sequence[int], topk: Sequence[Sequence[int]]) -> None:
        """A draft was scored; called before the `extend` of the same step.

        Args:
          request: whose draft it was.
          draft: the nodes that were scored, of all sources.
          accepted: the accepted nodes, a path.
          topk: the model's likeliest next tokens, likeliest first: after the newest token, then after each node.
            Empty where nobody told `TrieDrafter.observe_topk`.
        """

    def end(self, request: Hashable, remember: bool) -> None:
        """A request ends."""

    def insert(self, tokens: Sequence[int], namespace: Hashable | None) -> None:
        """A document joins shared memory."""

    def forget(self, namespace: Hashable | None) -> None:
        """Everything of a namespace is removed."""

    def open(
        self, request: Hashable, namespace: Hashable | None, text: Sequence[int], budget: int, max_depth: int
    ) -> Any:
        """The state at the end of `text`, or None where the source has nothing to say there."""
        raise NotImplementedError

    def predict(self, state: Any) -> Sequence[tuple[int, float]]:
        """Tokens and their shares, likeliest first; the shares sum to at most 1."""
        raise NotImplementedError

    def step(self, state: Any, token: int) -> Any:
        """The state after one more token, or None."""
        raise NotImplementedError


class SuccessorTable(Source):
    """The model's own likeliest next tokens after every token it has verified, accepted or not.

    After "Token Recycling" (Luo et al., arXiv 2408.08696), which fills the adjacency matrix from the top-k
    logits of every node of the verified tree.
    """

    name = "successors"

    def __init__(self, k: int = 8, max_entries: int = 1 << 17) -> None:
        """
        Args:
          k: successors kept per token.
          max_entries: tokens kept, over all namespaces; the longest unseen go first.
        """
        if k < 1 or max_entries < 1:
            raise ValueError(f"k={k} and max_entries={max_entries} must be at least 1")
        self.k = self.wants_topk = k
        self.max_entries = max_entries
        self._table: dict[tuple[Hashable | None, int], tuple[tuple[int, float], ...]] = {}
        weights = [1.0 / (rank + 1) ** 1.5 for rank in range(k)]
        self._shares = [weight / sum(weights) for weight in weights]

    def __len__(self) -> int:
        return len(self._table)

    def observe(self, namespace: Hashable | None, tokens: Sequence[int], topk: Sequence[Sequence[int]]) -> None:
        """Takes the `k` likeliest next tokens `topk[i]`, likeliest first, after each of `tokens`.

        Raises:
          ValueError: the two differ in length.
        """
        if len(tokens) != len(topk):
            raise ValueError(f"{len(tokens)} tokens but {len(topk)} rows of successors: one row a token is needed")
        table = self._table
        for token, row in zip(tokens, topk, strict=True):
            key = (namespace, int(token))
            table.pop(key, None)
            distinct = dict.fromkeys(int(successor) for successor in row)
            table[key] = tuple(zip(distinct, self._shares, strict=False))
        while len(table) > self.max_entries:
            del table[next(iter(table))]

    def forget(self, namespace: Hashable | None) -> None:
        """Drops everything of a namespace."""
        for key in [key for key in self._table if key[0] == namespace]:
            del self._table[key]

    def open(
        self, request: Hashable, namespace: Hashable | None, text: Sequence[int], budget: int, max_depth: int
    ) -> Any:
        return (namespace, text[-1]) if len(text) else None

    def predict(self, state: Any) -> Sequence[tuple[int, float]]:
        return self._table.get(state, ())

    def step(self, state: Any, token: int) -> Any:
        return (state[0], token)


Propose = Callable[[list[int], int, int], tuple[Any, ...]]


def checked_tree(found: tuple[Any, ...], budget: int, max_depth: int) -> Draft:
    """Turns what an outside drafter returned into a draft, cut to the limits, duplicates merged away.

    Args:
      found: `(token_ids, parents)` or `(token_ids, parents, probs)`; a parent of -1 is the newest token.
      budget: the most nodes.
      max_depth: the deepest level.

    Raises:
      ValueError: it isn't a tree whose parents come first.
    """
    if len(found) not in (2, 3):
        raise ValueError(f"an outside drafter must return (token_ids, parents[, probs]), got {len(found)} values")
    tokens = [int(token) for token in found[0]]
    parents = [int(parent) for parent in found[1]]
    probs = [float(prob) for prob in found[2]] if len(found) == 3 and found[2] is not None else None
    if len(parents) != len(tokens) or (probs is not None and len(probs) != len(tokens)):
        raise ValueError(f"an outside drafter returned {len(tokens)} token_ids but {len(parents)} parents")
    draft = Draft(probs=None if probs is None else [])
    depths: list[int] = []
    place: dict[tuple[int, int], int] = {}
    moved: list[int] = []
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not -1 <= parent < i:
            raise ValueError(f"an outside drafter returned parents[{i}]={parent}: parents must come before children")
        above = moved[parent] if parent >= 0 else -1
        depth = 1 if parent < 0 else (depths[above] + 1 if above >= 0 else max_depth + 1)
        known = place.get((above, token))
        if known is not None and depth <= max_depth:
            moved.append(known)
        elif token < 0 or depth > max_depth or len(draft) >= budget:
            moved.append(-2)
        else:
            place[above, token] = len(draft)
            moved.append(len(draft))
            depths.append(depth)
            draft.tokens.append(token)
            draft.parents.append(above)
            if draft.probs is not None and probs is not None:
                draft.probs.append(probs[i])
    return draft


class DrafterSource(Source):
    """A drafter as one more source: its trees join the expansion.

    A node's share of its parent is the ratio of their `probs`; without `probs`, earlier children get more, as the
    order of nodes is the order of worth.
    """

    def __init__(self, drafter: Drafter, name: str, *, first: bool = True) -> None:
        """
        Args:
          drafter: the drafter; it is told of every request of the trie drafter that has this source.
          name: what it is called.
          first: whether it is asked before the request's own and shared text.
        """
        self.drafter = drafter
        self.name = name
        self.first = first

    def begin(self, request: Hashable, prompt: Sequence[int], namespace: Hashable | None) -> None:
        self.drafter.begin(request, prompt, namespace=namespace)

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        self.drafter.extend(request, tokens)

    def end(self, request: Hashable, remember: bool) -> None:
        self.drafter.end(request, remember=remember)

    def insert(self, tokens: Sequence[int], namespace: Hashable | None) -> None:
        insert: Any = getattr(self.drafter, "insert", None)
        if insert is not None:
            insert(tokens) if namespace is None else insert(tokens, namespace=namespace)

    def open(
        self, request: Hashable, namespace: Hashable | None, text: Sequence[int], budget: int, max_depth: int
    ) -> Any:
        draft = self.drafter.draft(request, budget, max_depth)
        if not len(draft):
            return None
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(draft.parents):
            children.setdefault(parent, []).append(node)
        return (draft, children, -1)

    def predict(self, state: Any) -> Sequence[tuple[int, float]]:
        draft, children, node = state
        kids = children.get(node, ())
        if draft.probs is None:
            weights = [0.5**rank for rank in range(1, len(kids) + 1)]
        else:
            whole = max(draft.probs[node] if node >= 0 else 1.0, 1e-9)
            weights = [max(draft.probs[kid], 0.0) / whole for kid in kids]
        scale = 1.0 / max(sum(weights), 1.0)
        found = [(draft.tokens[kid], weight * scale) for kid, weight in zip(kids, weights, strict=True)]
        return sorted(found, key=lambda item: -item[1])

    def step(self, state: Any, token: int) -> Any:
        draft, children, node = state
        for kid in children.get(node, ()):
            if draft.tokens[kid] == token:
                return (draft, children, kid)
        return None


class OutsideDrafter(DrafterBase):
    """An outside drafter behind the `Drafter` protocol."""

    def __init__(self, propose: Propose) -> None:
        """
        Args:
          propose: `propose(text, budget, max_depth)` returns `(token_ids, parents)` or `(token_ids, parents, probs)`
            for the end of `text`; a parent of -1 is the newest token, `probs` are path probabilities.
        """
        self.propose = propose
        self._texts: dict[Hashable, list[int]] = {}

    def begin(self, request: Hashable, prompt: Sequence[int], *, namespace: Hashable | None = None) -> None:
        del namespace
        if request in self._texts:
            raise ValueError(f"request {request!r} has begun already: end it first")
        self._texts[request] = [int(token) for token in prompt]

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        self._texts[request] += [int(token) for token in tokens]

    def draft(self, request: Hashable, budget: int, max_depth: int) -> Draft:
        return checked_tree(self.propose(list(self._texts[request]), budget, max_depth), budget, max_depth)

    def end(self, request: Hashable, *, remember: bool = True) -> None:
        del remember
        del self._texts[request]


class OutsideSource(DrafterSource):
    """An outside drafter as one more source."""

    def __init__(self, propose: Propose, name: str = "outside", *, first: bool = True) -> None:
        """
        Args:
          propose: as for `OutsideDrafter`.
          name: what it is called.
          first: whether it is asked before the request's own and shared text.
        """
        super().__init__(OutsideDrafter(propose), name, first=first)
