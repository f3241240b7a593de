"""Responses as coloured text."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from jaxlookahead.results import Output

_STYLES = ("bold green", "bold cyan", "bold magenta", "bold yellow", "bold blue")


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds.

    A character that several tokens make up is given to the last of them; bytes that are no UTF-8 become U+FFFD.
    The pieces together are the text of all tokens.
    """
    out: list[str] = []
    start = done = 0  # tokens before `start` need not be decoded again
    before = ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(list(tokens[start:end]))
        whole = not text.endswith("\ufffd") or end == len(tokens)
        # Without a token before it, a tokenizer may drop a leading space; so the last whole piece stays in view.
        out.append(text[len(before) :] if whole else "")
        if whole:
            start, done = done, end
            before = tokenizer.decode(list(tokens[start:done]))
    return out


def printable(text: str) -> str:
    """Replaces control characters, which could steer a terminal, by their names' pictures or U+FFFD."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else
        chr(0x2400 + ord(c)) if ord(c) < 0x20 else "\ufffd"
        for c in text
    )  # fmt: skip


def styles(sources: Sequence[str | None]) -> dict[str, str]:
    """A colour for each source, in the order of their names."""
    names = sorted({source for source in sources if source is not None})
    return {name: _STYLES[i % len(_STYLES)] for i, name in enumerate(names)}


def coloured(output: Output, tokenizer: Any) -> Text:
    """The response with the tokens that a draft had proposed in colour, by source where the drafter tells it."""
    colours = styles(output.sources)
    text = Text()
    for piece, drafted, source in zip(
        pieces(tokenizer, output.tokens.tolist()), output.from_draft, output.sources, strict=True
    ):
        style = colours.get(source, _STYLES[0]) if drafted and source is not None else _STYLES[0] if drafted else ""
        text.append(printable(piece), style)
    return text
