"""Lookahead decoding for JAX: draft trees from a trie, verified in one call, with the tokens of plain decoding.

Decoding
  load                   a model, its parameters and its tokenizer from a checkpoint: `Loaded`
  generate               decodes prompts: a `Generation` of `Output`s with `Stats`
  stream                 the same as it happens: `Chunk`s
  warm_up                compiles ahead
  Sampling               how a request chooses its tokens
  first_difference       where two responses part

Drafters
  TrieDrafter            remembers requests, responses and documents; the default
  PromptLookup           the request's own text
  DraftModel             a smaller model
  Drafter, Draft         the protocol, and what a drafter proposes

Models
  Model                  the contract
  check_model            whether a model keeps it

Inside jitted functions
  verify                 one step: a `DraftTree` in, `Verified` out
  on_device.generate     the whole loop

Errors
  BadLogitsError, ModelCheckError, TrieFileError, UnsupportedCacheError

Modules, imported at first use
  adapters, checkpoints, drafters, encoder_decoder, models, on_device, rollout, sampling, show, testing
"""

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
    from jaxlookahead.drafters.stored_index import TrieFileError
    from jaxlookahead.drafters.trie import TrieDrafter
    from jaxlookahead.models.protocol import Model
    from jaxlookahead.results import BadLogitsError, Chunk, Generation, Output, Stats, first_difference
    from jaxlookahead.rollout import Rollout
    from jaxlookahead.sampling.params import Sampling
    from jaxlookahead.step import Verified, verify
    from jaxlookahead.testing import ModelCheckError, check_model
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
    "ModelCheckError": "testing",
    "Output": "results",
    "PromptLookup": "drafters.prompt_lookup",
    "Rollout": "rollout",
    "Sampling": "sampling.params",
    "Stats": "results",
    "TrieDrafter": "drafters.trie",
    "TrieFileError": "drafters.stored_index",
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

_SUBMODULES = (
    "adapters",
    "checkpoints",
    "drafters",
    "encoder_decoder",
    "models",
    "on_device",
    "rollout",
    "sampling",
    "show",
    "testing",
)

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
    "ModelCheckError",
    "Output",
    "PromptLookup",
    "Rollout",
    "Sampling",
    "Stats",
    "TrieDrafter",
    "TrieFileError",
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
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
