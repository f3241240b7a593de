"""Outside drafters: the suffix cache of `arctic-inference`, alone and as one more source of the trie drafter.

    pip install arctic-inference
    python examples/outside_drafter.py TRACES

replays recorded responses with the trie drafter, with the suffix cache, and with both. To decode with it, pass
`drafter=ArcticDrafter()` or `drafter=WithArctic()` to `jaxlookahead.generate`.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import Any

from jaxlookahead.drafters import Draft, DrafterBase, OutsideSource, TrieDrafter
from jaxlookahead.drafters.sources import checked_tree
from jaxlookahead.replay.report import table
from jaxlookahead.replay.run import replay
from jaxlookahead.replay.traces import read_traces


class ArcticDrafter(DrafterBase):
    """The suffix cache behind the `Drafter` protocol."""

    def __init__(self, **options: Any) -> None:
        """
        Args:
          **options: for `SuffixDecodingCache.speculate`, such as `min_token_prob`.
        """
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(max_tree_depth=64)
        # Trees, and long ones: its defaults are meant for verifying single branches.
        chosen = {"max_spec_factor": 2.0, "max_spec_offset": 4.0, "min_token_prob": 0.01, "use_tree_spec": True}
        self.options = chosen | options
        self._texts: dict[Hashable, list[int]] = {}
        self._inserted = 0

    def insert(self, tokens: Sequence[int]) -> None:
        """Remembers a past response."""
        self._inserted += 1
        name = ("inserted", self._inserted)
        self.cache.start_request(name, [0])
        self.cache.add_active_response(name, list(tokens))
        self.cache.stop_request(name)

    def begin(self, request: Hashable, prompt: Sequence[int], *, namespace: Hashable | None = None) -> None:
        del namespace
        self._texts[request] = list(prompt)
        self.cache.start_request(request, list(prompt))

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        self._texts[request] += tokens
        self.cache.add_active_response(request, list(tokens))

    def draft(self, request: Hashable, budget: int, max_depth: int) -> Draft:
        return checked_tree(self.propose(request, self._texts[request], budget), budget, max_depth)

    def end(self, request: Hashable, *, remember: bool = True) -> None:
        del self._texts[request]
        self.cache.stop_request(request)
        if not remember:
            self.cache.evict_cached_response(request)

    def propose(self, request: Hashable, text: Sequence[int], budget: int) -> tuple[Any, ...]:
        """The cache's tree for the end of `text`."""
        found = self.cache.speculate(request, list(text[-64:]), max_spec_tokens=budget, **self.options)
        return found.token_ids, found.parents, found.probs


class WithArctic(TrieDrafter):
    """The trie drafter with the suffix cache's tree as one more source."""

    def __init__(self, **options: Any) -> None:
        self.arctic = ArcticDrafter()
        source = OutsideSource(self._propose, name="arctic", first=False)
        super().__init__(sources=[source], **options)
        self._request: Hashable = None

    def _propose(self, text: list[int], budget: int, max_depth: int) -> tuple[Any, ...]:
        del max_depth
        return self.arctic.propose(self._request, text, budget)

    def insert(self, tokens: Sequence[int], **options: Any) -> None:
        super().insert(tokens, **options)
        self.arctic.insert(tokens)

    def begin(self, request: Hashable, prompt: Sequence[int], *, namespace: Hashable | None = None) -> None:
        super().begin(request, prompt, namespace=namespace)
        self.arctic.begin(request, prompt)

    def extend(self, request: Hashable, tokens: Sequence[int]) -> None:
        super().extend(request, tokens)
        self.arctic.extend(request, tokens)

    def draft(self, request: Hashable, budget: int, max_depth: int) -> Draft:
        self._request = request
        return super().draft(request, budget, max_depth)

    def end(self, request: Hashable, *, remember: bool = True) -> None:
        super().end(request, remember=remember)
        self.arctic.end(request, remember=remember)


def main() -> None:
    traces = read_traces(sys.argv[1])
    arctic = replay(ArcticDrafter, traces)
    for make in (TrieDrafter, WithArctic):
        print(table(replay(make, traces), f"{make.__name__}, budget 32, warm", arctic, "arctic"), end="\n\n")


if __name__ == "__main__":
    main()
