"""Tokenizers of checkpoints, and what ends a response."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Tokenizer = Any

_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_REMEDY = (
    "pass tokenizer= a directory or hub id that has one, or a tokenizer of your own, or tokenizer=None to "
    "work with "
    "token ids alone"
)


def from_directory(path: Path) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face directory.

    Raises:
      ValueError: there is none, or it can't be read.
    """
    if not any((path / name).is_file() for name in _FILES):
        raise ValueError(f"{path} holds no tokenizer (none of {', '.join(_FILES)}): {_REMEDY}")
    with _without_advice():
        from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # The library raises whatever its parsers raise.
        raise ValueError(f"the tokenizer in {path} can't be read ({error}): {_REMEDY}") from error


def from_gguf(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that a GGUF file's metadata describes.

    Args:
      path: of the file, for messages.
      metadata: of the file.

    Raises:
      ValueError: the file holds none, or of a kind that is not supported, named.
    """
    from jaxlookahead.checkpoints.gguf_tokenizer import backend, special_tokens

    if not isinstance(metadata.get("tokenizer.ggml.tokens"), list):
        raise ValueError(f"{path} holds no tokenizer: {_REMEDY}")
    try:
        tokenizer = backend(metadata)
        special = special_tokens(metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {_REMEDY}") from error
    except Exception as error:  # The Rust library raises bare exceptions for merges that contradict the vocabulary.
        raise ValueError(f"{path}: the tokenizer is damaged ({error}); {_REMEDY}") from error
    template = metadata.get("tokenizer.chat_template")
    with _without_advice():
        from transformers import PreTrainedTokenizerFast
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template if isinstance(template, str) else None,
        clean_up_tokenization_spaces=False,
        **special,
    )


def chat_ids(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a conversation with the assistant's turn opened.

    Args:
      tokenizer: of the checkpoint.
      messages: `role` and `content` of each turn, oldest first.

    Raises:
      ValueError: the tokenizer has no chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template: encode plain text with tokenizer.encode(text)")
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    # The template writes the special tokens itself.
    return list(tokenizer.encode(text, add_special_tokens=False))


def eos_ids(tokenizer: Tokenizer | None, *configs: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Every token id that ends a response, ascending.

    Args:
      tokenizer: whose end-of-sequence token counts; None where there is none.
      *configs: contents of `generation_config.json` and `config.json`, most binding first; the first that
        has an `eos_token_id`, one or a list, counts.
    """
    found: set[int] = set()
    for config in configs:
        stated = (config or {}).get("eos_token_id")
        if stated is not None:
            found.update([stated] if isinstance(stated, int) else stated)
            break
    if tokenizer is not None and getattr(tokenizer, "eos_token_id", None) is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(int(i) for i in found))


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Keeps transformers from advising to install torch, which nothing here needs."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
