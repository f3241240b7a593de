"""Drafters by name."""

from __future__ import annotations

from jaxlookahead.drafters.prompt_lookup import PromptLookup
from jaxlookahead.drafters.protocol import Drafter
from jaxlookahead.drafters.trie import TrieDrafter

DRAFTERS = {"trie": TrieDrafter, "prompt_lookup": PromptLookup}


def make_drafter(drafter: Drafter | str | None) -> Drafter | None:
    """A new drafter of the name given; an object passes through, None stays None (plain decoding).

    Raises:
      ValueError: the name is unknown.
      TypeError: the object lacks a method of the `Drafter` protocol.
    """
    if drafter is None:
        return None
    if isinstance(drafter, str):
        if drafter not in DRAFTERS:
            raise ValueError(
                f"drafter {drafter!r} is unknown; choose {', '.join(map(repr, DRAFTERS))}, an object or None"
            )
        return DRAFTERS[drafter]()
    if isinstance(drafter, type):
        raise TypeError(
            f"drafter {drafter!r} must be a name, None or an instance with the methods of the Drafter protocol"
        )
    methods = ("begin", "draft", "extend", "end", "idle", "verified")
    if missing := [name for name in methods if not hasattr(drafter, name)]:
        raise TypeError(
            f"drafter {drafter!r} lacks {', '.join(missing)} of the Drafter protocol; a subclass of "
            "jaxlookahead.drafters.DrafterBase has those that may do nothing"
        )
    return drafter
