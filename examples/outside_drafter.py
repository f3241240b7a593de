"""Outside drafters: the suffix cache of `arctic-inference`, alone and as one more source of the trie drafter.

    pip install arctic-inference
    python examples/outside_drafter.py TRACES

replays recorded responses with the trie drafter, with the suffix cache, and with both. To decode with it, pass
`drafter=ArcticDrafter()` or `drafter=with_arctic()` to `jaxlookahead.generate`.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import Any

from jaxlookahead.drafters import Draft, DrafterBase, DrafterSource, TrieDrafter
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
        newest = self._texts[request][-64:]
        found = self.cache.speculate(request, newest, max_spec_tokens=budget, **self.options)
        return checked_tree((found.token_ids, found.parents, found.probs), budget, max_depth)

    def end(self, request: Hashable, *, remember: bool = True) -> None:
        del self._texts[request]
        self.cache.stop_request(request)
        if not remember:
            self.cache.evict_cached_response(request)


def with_arctic() -> TrieDrafter:
    """The trie drafter with the suffix cache's trees as one more source."""
    return TrieDrafter(sources=[DrafterSource(ArcticDrafter(), "arctic", first=False)])


def main() -> None:
    traces = read_traces(sys.argv[1])
    arctic = replay(ArcticDrafter, traces)
    for make in (TrieDrafter, with_arctic):
        print(table(replay(make, traces), f"{make.__name__}, budget 32, warm", arctic, "arctic"), end="\n\n")


if __name__ == "__main__":
    main()
