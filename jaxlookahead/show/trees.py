"""Draft trees, drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rich.text import Text
from rich.tree import Tree

from jaxlookahead.drafters.protocol import Draft
from jaxlookahead.show.text import label, printable

_ACCEPTED = "#2e9e4f"
_REJECTED = "#999999"


def text_tree(draft: Draft, tokenizer: Any, *, accepted: Sequence[int] = (), root: int | None = None) -> Tree:
    """A draft as a tree of text, for `rich.print`: accepted nodes green, with the estimated probability of each.

    Args:
      draft: parents before their children, as `tree.normalize` leaves it.
      tokenizer: has `decode(ids) -> str`.
      accepted: indices of the accepted nodes.
      root: the newest token, which the draft follows.
    """
    out = Tree(Text("(newest token)" if root is None else label(tokenizer, root), "bold"), guide_style="dim")
    chosen = set(accepted)
    nodes: list[Tree] = []
    for i, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        text = Text(label(tokenizer, token), "bold green" if i in chosen else "")
        if draft.probs is not None:
            text.append(f"  {draft.probs[i]:.2f}", "dim")
        if draft.sources is not None:
            text.append(f"  {printable(draft.sources[i])}", "dim")
        nodes.append((out if parent < 0 else nodes[parent]).add(text))
    return out


def plot_tree(
    draft: Draft,
    tokenizer: Any,
    *,
    accepted: Sequence[int] = (),
    root: int | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Any:
    """A draft as a picture: depth to the right, the accepted path green.

    Args:
      draft: see `text_tree`, and so are `tokenizer`, `accepted` and `root`.
      path: where to write the picture, if anywhere; the ending decides the format.

    Returns:
      a matplotlib `Figure`, which a notebook displays.

    Raises:
      ImportError: matplotlib is not installed.
    """
    from jaxlookahead.show.plots import new_figure, save

    places = _layout(draft)
    depth = max((x for x, _ in places), default=0)
    height = max((y for _, y in places), default=0) + 1
    figure = new_figure(2 + 0.8 * depth, 0.8 + 0.32 * height)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(-0.3, depth + 0.9)
    axes.set_ylim(height - 0.3, -0.7)
    chosen = set(accepted)
    centre = (0.0, places[draft.parents.index(-1)][1] if draft.tokens else 0.0)
    for i, parent in enumerate(draft.parents):
        start = centre if parent < 0 else places[parent]
        style = {"color": _ACCEPTED, "linewidth": 2.0} if i in chosen else {"color": _REJECTED, "linewidth": 0.8}
        axes.plot(*zip(start, places[i], strict=True), zorder=1, **style)
    labels = [(centre, "(newest)" if root is None else label(tokenizer, root), True)]
    labels += [(places[i], label(tokenizer, token), i in chosen) for i, token in enumerate(draft.tokens)]
    ids = [root, *draft.tokens]
    box = {"boxstyle": "round,pad=0.25", "facecolor": "white"}
    for (place, text, accept), token in zip(labels, ids, strict=True):
        axes.text(
            *place,
            _drawable(text, token),
            fontsize=8,
            ha="center",
            va="center",
            parse_math=False,
            bbox={**box, "edgecolor": _ACCEPTED if accept else _REJECTED},
        )
    return save(figure, path)


def _layout(draft: Draft) -> list[tuple[float, float]]:
    """Depth and line of each node: the first child goes on in its parent's line, the others below."""
    children: dict[int, list[int]] = {}
    for i, parent in enumerate(draft.parents):
        children.setdefault(parent, []).append(i)
    places = [(0.0, 0.0)] * len(draft.tokens)
    line = -1
    # A stack, since a draft may be deeper than Python recurses.
    waiting = [(node, 1, k == 0) for k, node in reversed(list(enumerate(children.get(-1, ()))))]
    while waiting:
        node, depth, first = waiting.pop()
        if not first or line < 0:
            line += 1
        places[node] = (float(depth), float(line))
        waiting += [(child, depth + 1, k == 0) for k, child in reversed(list(enumerate(children.get(node, ()))))]
    return places


def _drawable(text: str, token: int | None) -> str:
    """The text, or the token's id where the font lacks a glyph."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans"))
    text = text if len(text) <= 16 else text[:15] + "\u2026"
    return text if all(font.get_char_index(ord(c)) for c in text) else f"#{token}"
