"""A response for notebooks and terminals."""

from __future__ import annotations

import dataclasses
import html
import io
import math
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from jaxlookahead.results import Generation, Output
from jaxlookahead.show.text import coloured, pieces, printable, styles

# Of the sources, in the order of `styles`: readable on white and on the dark themes' grey.
_COLOURS = ("#2e9e4f", "#1697ad", "#b0479f", "#b08a1e", "#4274d0")
_BLOCK = "white-space:pre-wrap;unicode-bidi:plaintext;font-family:monospace;margin:0.5em 0"


@dataclasses.dataclass(frozen=True)
class Shown:
    """A response to be looked at: coloured text in a terminal, HTML in a notebook.

    Attributes:
      output: the response.
      tokenizer: that made its tokens.
    """

    output: Output
    tokenizer: Any

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        del console, options
        yield coloured(self.output, self.tokenizer)
        yield self._legend()

    def __repr__(self) -> str:
        terminal = sys.stdout is not None and sys.stdout.isatty()
        console = Console(file=io.StringIO(), force_terminal=terminal, force_jupyter=False)
        console.print(self, soft_wrap=True)
        return console.file.getvalue().rstrip("\n")  # type: ignore[attr-defined]

    def _repr_html_(self) -> str:
        output = self.output
        numbers = {name: i for i, name in enumerate(styles(output.sources))}
        spans = []
        for i, piece in enumerate(pieces(self.tokenizer, output.tokens.tolist())):
            source = output.sources[i]
            style = ""
            if output.from_draft[i]:
                colour = _COLOURS[numbers.get(source, 0) % len(_COLOURS)] if source is not None else _COLOURS[0]
                style = f' style="color:{colour};font-weight:600"'
            text = html.escape(printable(piece))
            spans.append(f'<span title="{html.escape(_hover(output, i))}"{style}>{text}</span>')
        legend = html.escape(self._legend().plain)
        return f'<div dir="auto" style="{_BLOCK}">{"".join(spans)}</div><div style="opacity:0.7">{legend}</div>'

    def _legend(self) -> Text:
        output, stats = self.output, self.output.stats
        text = Text(style="dim")
        text.append(
            f"{len(output.tokens)} tokens in {stats.steps} calls, {int(output.from_draft.sum())} of them drafted"
        )
        for name, style in styles(output.sources).items():
            count = sum(source == name for source in output.sources)
            text.append(", ").append(f"{printable(name)} {count}", style)
        if output.finish_reason is not None:
            text.append(f"; ended by {output.finish_reason}")
        return text


def _hover(output: Output, i: int) -> str:
    """What a reader may want to know about token `i`."""
    parts = [f"token {int(output.tokens[i])}"]
    if output.from_draft[i]:
        source = output.sources[i]
        parts.append("drafted" if source is None else f"drafted from {printable(source)}")
    logprob = output.scores.get("logprob")
    if logprob is not None and math.isfinite(logprob[i]):
        parts.append(f"probability {math.exp(min(float(logprob[i]), 0.0)):.3g}")
    else:
        parts.append(f"margin {float(output.margins[i]):.3g}")
    return ", ".join(parts)


def show(output: Output | Generation, tokenizer: Any) -> Shown:
    """A response to be looked at. In a notebook, make it the last line of a cell; elsewhere, `print` it.

    Tokens that a draft had proposed are coloured, by source where the drafter tells it (`TrieDrafter(labels=True)`).
    In notebooks the pointer shows each token's probability, where log-probabilities were asked for
    (`generate(..., logprobs=True)`), or else its margin.

    Args:
      output: one response, or a run with exactly one.
      tokenizer: has `decode(ids) -> str`.

    Raises:
      ValueError: the run has several responses.
    """
    if isinstance(output, Generation):
        if len(output) != 1:
            raise ValueError(f"the run has {len(output)} responses: show one of them, as in show(result[0], tokenizer)")
        output = output[0]
    return Shown(output, tokenizer)
