"""Drafters by name."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from jaxlookahead.drafters.prompt_lookup import PromptLookup
from jaxlookahead.drafters.protocol import Drafter
from jaxlookahead.drafters.registry import DRAFTERS
from jaxlookahead.drafters.trie import TrieDrafter

NAMED: dict[str, Callable[..., Drafter]] = {
    **DRAFTERS,
    "trie_parallel": functools.partial(TrieDrafter, mode="parallel"),
    "trie_single": functools.partial(TrieDrafter, mode="single"),
    "trie_request_only": functools.partial(TrieDrafter, use_shared=False),
    "trie_shared_only": functools.partial(TrieDrafter, use_request=False),
    "prompt_lookup_earliest": functools.partial(PromptLookup, match="earliest"),
    "prompt_lookup_frequent": functools.partial(PromptLookup, match="most_frequent"),
}


def drafter_factory(name: str, *, mode: str | None = None) -> Callable[[], Drafter]:
    """A function that makes fresh drafters of a name.

    Args:
      name: one of `NAMED`, or `package.module:callable` for one's own.
      mode: `tree`, `parallel` or `single`, for the trie drafters.

    Raises:
      ValueError: there is no such drafter, or it has no modes.
    """
    make: Any = NAMED.get(name)
    if make is None:
        module, _, attribute = name.partition(":")
        if not attribute:
            raise ValueError(f"unknown drafter {name!r}: use one of {', '.join(NAMED)}, or package.module:callable")
        try:
            make = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"drafter {name!r} can't be imported: {error}") from None
        if not callable(make):
            raise ValueError(f"drafter {name!r} is not callable")
    if mode is None:
        return make
    if not name.startswith("trie"):
        raise ValueError(f"drafter {name!r} has no modes: leave mode={mode!r} out")
    return functools.partial(make, mode=mode)
