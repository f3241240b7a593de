"""Lookahead decoding for JAX: draft trees from a trie, verified in one call, with the tokens of plain decoding."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxlookahead.cache import UnsupportedCacheError
    from jaxlookahead.checkpoints.load import Loaded, load
    from jaxlookahead.decoding import generate, stream, warm_up
    from jaxlookahead.drafters.draft_model import DraftModel
    from jaxlookahead.drafters.prompt_lookup import PromptLookup
    from jaxlookahead.drafters.protocol import Draft, Drafter
    from jaxlookahead.drafters.trie import TrieDrafter
    from jaxlookahead.models.protocol import Model
    from jaxlookahead.results import BadLogitsError, Chunk, Generation, Output, Stats, first_difference
    from jaxlookahead.rollout import Rollout
    from jaxlookahead.sampling.params import Sampling
    from jaxlookahead.step import Verified, verify
    from jaxlookahead.testing import check_model
    from jaxlookahead.tree import DraftTree

_MODULES = {
    "BadLogitsError": "results",
    "Chunk": "results",
    "Draft": "drafters.protocol",
    "DraftModel": "drafters.draft_model",
    "DraftTree": "tree",
    "Drafter": "drafters.protocol",
    "Generation": "results",
    "Loaded": "checkpoints.load",
    "Model": "models.protocol",
    "Output": "results",
    "PromptLookup": "drafters.prompt_lookup",
    "Rollout": "rollout",
    "Sampling": "sampling.params",
    "Stats": "results",
    "TrieDrafter": "drafters.trie",
    "UnsupportedCacheError": "cache",
    "Verified": "step",
    "check_model": "testing",
    "first_difference": "results",
    "generate": "decoding",
    "load": "checkpoints.load",
    "stream": "decoding",
    "verify": "step",
    "warm_up": "decoding",
}

__version__ = "0.1.0"
__all__ = [
    "BadLogitsError",
    "Chunk",
    "Draft",
    "DraftModel",
    "DraftTree",
    "Drafter",
    "Generation",
    "Loaded",
    "Model",
    "Output",
    "PromptLookup",
    "Rollout",
    "Sampling",
    "Stats",
    "TrieDrafter",
    "UnsupportedCacheError",
    "Verified",
    "check_model",
    "first_difference",
    "generate",
    "load",
    "stream",
    "verify",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    # Imported at first use: `import jaxlookahead` costs next to nothing.
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
