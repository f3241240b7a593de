"""Sources of draft trees. All run on the host, in plain Python and numpy."""

from jaxlookahead.drafters.guesses import GuessPool
from jaxlookahead.drafters.persistence import tokenizer_fingerprint
from jaxlookahead.drafters.prompt_lookup import PromptLookup
from jaxlookahead.drafters.protocol import Draft, Drafter, DrafterBase
from jaxlookahead.drafters.sources import (
    DrafterSource,
    OutsideDrafter,
    OutsideSource,
    Source,
    SuccessorTable,
)
from jaxlookahead.drafters.stored_index import TrieFileError
from jaxlookahead.drafters.trie import TrieDrafter

__all__ = [
    "Draft",
    "Drafter",
    "DrafterBase",
    "DrafterSource",
    "GuessPool",
    "OutsideDrafter",
    "OutsideSource",
    "PromptLookup",
    "Source",
    "SuccessorTable",
    "TrieDrafter",
    "TrieFileError",
    "tokenizer_fingerprint",
]
