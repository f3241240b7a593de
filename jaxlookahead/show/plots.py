"""Plots of statistics and of recorded steps."""

from __future__ import annotations

import functools
import io
import itertools
import os
from collections.abc import Sequence
from typing import Any

from jaxlookahead.results import Stats
from jaxlookahead.show.record import Step
from jaxlookahead.show.text import printable

Path = str | os.PathLike[str] | None


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure, in inches; no window, no global state. Notebooks display it.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'jaxlookahead[plots]'") from error
    return _displayed(Figure)(figsize=(width, height), layout="constrained")


@functools.cache
def _displayed(figure: Any) -> Any:
    class Picture(figure):  # type: ignore[misc]
        # Notebooks know how to display a `Figure` only once somebody has imported pyplot.
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    return Picture


def save(figure: Any, path: Path) -> Any:
    """Writes a figure, if a path is given, and returns it."""
    if path is not None:
        figure.savefig(path)
    return figure


def plot_stats(stats: Stats, *, path: Path = None) -> Any:
    """How many draft tokens each step accepted, and where the time went.

    Args:
      stats: of a run or a request.
      path: where to write the picture, if anywhere; the ending decides the format.

    Returns:
      a matplotlib `Figure`, which a notebook displays.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: the ending names no format.
    """
    figure = new_figure(8, 3)
    left, right = figure.subplots(1, 2)
    left.bar(range(len(stats.histogram)), stats.histogram)
    left.set_xlabel("accepted draft tokens")
    left.set_ylabel("steps")
    for axis in (left.xaxis, left.yaxis):
        axis.get_major_locator().set_params(integer=True)
    left.set_title(f"{stats.tokens_per_call:.2f} tokens per call")
    shares = {"prefill": stats.prefill_seconds, "draft": stats.draft_seconds, "steps": stats.step_seconds}
    bars = right.barh(list(shares), list(shares.values()))
    total = sum(shares.values())
    right.bar_label(bars, [f"{seconds / total:.0%}" if total else "" for seconds in shares.values()], padding=2)
    right.margins(x=0.15)
    right.invert_yaxis()
    right.set_xlabel("seconds, compilation included")
    return save(figure, path)


def plot_acceptance(steps: Sequence[Step], *, path: Path = None) -> Any:
    """Share of the drafted nodes that was accepted, by depth and by source.

    Args:
      steps: of a `Recorder`.
      path: see `plot_stats`, which returns and raises the same.
    """
    depths: dict[int, list[int]] = {}
    sources: dict[str, list[int]] = {}
    for step in steps:
        accepted = set(step.accepted)
        for i, depth in enumerate(step.depths()):
            depths.setdefault(depth, []).append(i in accepted)
            if step.draft.sources is not None:
                sources.setdefault(printable(step.draft.sources[i]), []).append(i in accepted)
    figure = new_figure(8, 3)
    left, right = figure.subplots(1, 2, sharey=True)
    left.bar(sorted(depths), [sum(depths[depth]) / len(depths[depth]) for depth in sorted(depths)])
    left.set_xlabel("depth in the draft")
    left.set_ylabel("accepted share of the nodes")
    left.set_ylim(0, 1)
    left.xaxis.get_major_locator().set_params(integer=True)
    right.bar(sorted(sources), [sum(sources[name]) / len(sources[name]) for name in sorted(sources)])
    right.set_xlabel("source" if sources else "source (not told: TrieDrafter(labels=True))")
    return save(figure, path)


def plot_run(steps: Sequence[Step], *, path: Path = None) -> Any:
    """How a run went: nodes verified and tokens emitted step by step, tokens per second, tokens per call by request.

    The last panel shows a memory going from cold to warm.

    Args:
      steps: of a `Recorder`.
      path: see `plot_stats`, which returns and raises the same.
    """
    figure = new_figure(12, 3)
    sizes, speed, warmth = figure.subplots(1, 3)
    sizes.plot([len(step.draft) + 1 for step in steps], linewidth=0.8, label="verified")
    sizes.plot([len(step.tokens) for step in steps], linewidth=0.8, label="emitted")
    sizes.set_xlabel("step")
    sizes.set_ylabel("tokens")
    sizes.legend()
    size = max(len(steps) // 20, 1)
    ends = range(size - 1, len(steps), size)
    places, rates = [], []
    for before, end in itertools.pairwise(ends):
        seconds = steps[end].seconds - steps[before].seconds
        if seconds > 0:
            places.append(end)
            rates.append(sum(len(step.tokens) for step in steps[before + 1 : end + 1]) / seconds)
    # By step, not by time: where something compiled, the line dips instead of leaping.
    speed.plot(places, rates, marker=".")
    speed.set_xlabel("step")
    speed.set_ylabel("tokens per second")
    speed.set_ylim(bottom=0)
    requests: dict[int, list[int]] = {}
    for step in steps:
        requests.setdefault(step.request, []).append(len(step.tokens))
    warmth.plot(list(requests), [sum(counts) / len(counts) for counts in requests.values()], marker=".")
    warmth.set_xlabel("request")
    warmth.set_ylabel("tokens per call")
    warmth.set_ylim(bottom=0)
    for axes in figure.axes:
        axes.xaxis.get_major_locator().set_params(integer=True)
    return save(figure, path)
