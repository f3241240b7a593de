"""Responses as text: what each token adds, safe to print, in colour."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from jaxlookahead.results import Output

_STYLES = ("bold green", "bold cyan", "bold magenta", "bold yellow", "bold blue")
# Invisible, but scripts and emoji are spelt with them, and they steer nothing.
_JOINERS = "\u200c\u200d"


class Detokenizer:
    """Turns tokens into text as they come.

    A character that several tokens make up is given to the last of them; bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Any) -> None:
        """
        Args:
          tokenizer: has `decode(ids) -> str`.
        """
        self._tokenizer = tokenizer
        # Without a token before it, a tokenizer may drop a leading space; so the last whole piece stays in view.
        self._window: list[int] = []
        self._whole = 0
        self._before = ""

    def add(self, token: int, *, last: bool = False) -> str:
        """The text that `token` adds; `last` gives out what is left of an unfinished character too."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if text.endswith("\ufffd") and not last:
            return ""
        piece = text[len(self._before) :]
        self._window = self._window[self._whole :]
        self._whole = len(self._window)
        self._before = self._tokenizer.decode(self._window)
        return piece

    def finish(self) -> str:
        """What is left of an unfinished character."""
        return self._tokenizer.decode(self._window)[len(self._before) :]


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds, see `Detokenizer`. Joined, they are the text of all tokens."""
    ids = [int(token) for token in tokens]
    detokenizer = Detokenizer(tokenizer)
    out = [detokenizer.add(token, last=i == len(ids)) for i, token in enumerate(ids, 1)]
    text = tokenizer.decode(ids)
    if "".join(out) == text:
        return out
    # A tokenizer that rewrites what it has decoded before: each token gets what it adds to the final text.
    ends, end = [], 0
    for i in range(1, len(ids) + 1):
        end = max(end, _common(tokenizer.decode(ids[:i]), text))
        ends.append(end)
    ends[-1] = len(text)
    return [text[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def _common(a: str, b: str) -> int:
    """Length of the common beginning."""
    size = min(len(a), len(b))
    return next((i for i in range(size) if a[i] != b[i]), size)


def printable(text: str) -> str:
    """Replaces what could steer a terminal or turn the text around by the pictures of its characters or U+FFFD.

    That is control and format characters (escapes, marks of writing direction) and lone surrogates; newlines and tabs
    stay, and so do letters that run from right to left.
    """
    return "".join(map(_printable, text))


def _printable(c: str) -> str:
    if c in "\n\t" or c in _JOINERS or unicodedata.category(c) not in ("Cc", "Cf", "Cs"):
        return c
    if ord(c) < 0x20:
        return chr(0x2400 + ord(c))
    return "\u2421" if c == "\x7f" else "\ufffd"


def label(tokenizer: Any, token: int) -> str:
    """One token on one line, spaces visible; its id where it is no text by itself."""
    text = tokenizer.decode([token])
    if not text or "\ufffd" in text:
        return f"#{token}"
    shown = printable(text).replace("\n", "\u240a").replace("\t", "\u2409")
    return shown if shown.strip() == shown else shown.replace(" ", "\u2423")


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
