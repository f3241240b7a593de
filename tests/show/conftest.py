from __future__ import annotations

import numpy as np
import pytest

from jaxlookahead.results import Output, Stats

# Nothing here is timed: a busy machine must not fail a test.


@pytest.fixture(scope="session")
def byte_tokenizer():
    """A byte-level BPE tokenizer whose ids 0 to 255 are the bytes, with a few merges and a special token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # The characters that byte-level tokenizers write bytes with.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(plain)))
    vocabulary = {letters[byte]: byte for byte in range(256)}
    merges = [(letters[ord(a)], letters[ord(b)]) for a, b in ("th", "in", " a")]
    merges.append((letters[0xC3], letters[0xA9]))
    for a, b in merges:
        vocabulary[a + b] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


@pytest.fixture(scope="session")
def make_output():
    """Makes a response from tokens and the source of each, None for the model's own."""

    def make(tokens, sources=None, logprobs=None) -> Output:
        sources = sources or [None] * len(tokens)
        stats = Stats()
        drafted = sum(source is not None for source in sources)
        stats.steps = 1
        stats.count(emitted=len(tokens), drafted=drafted, accepted=drafted)
        return Output(
            request=0,
            sample=0,
            tokens=np.array(tokens, np.int32),
            from_draft=np.array([source is not None for source in sources], bool),
            sources=list(sources),
            margins=np.full(len(tokens), 0.5, np.float32),
            scores={} if logprobs is None else {"logprob": np.array(logprobs, np.float32)},
            finish_reason="length",
            stats=stats,
        )

    return make
