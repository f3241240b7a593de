"""Tables, JSON and plots of replays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from jaxlookahead.replay.run import CALIBRATION_BINS, ReplayResult, TaskResult


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` of `values` lie, None of none."""
    if not values:
        return None
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def task_json(task: TaskResult, result: ReplayResult) -> dict[str, Any]:
    """One task's figures; those of the shared memory are the whole replay's."""
    return {
        "rows": task.rows,
        "tokens": task.tokens,
        "calls": task.calls,
        "tokens_per_call": task.tokens_per_call,
        "nodes_per_call": task.nodes / task.calls if task.calls else 0.0,
        "accepted_share": task.accepted / task.nodes if task.nodes else 0.0,
        "draft_us_p50": quantile(task.draft_us, 0.5),
        "draft_us_p99": quantile(task.draft_us, 0.99),
        "insert_us_per_token": result.insert_us_per_token,
        "nodes": result.nodes,
        "bytes_per_token": result.bytes_per_token,
        "calibration": [
            {
                "from": low / CALIBRATION_BINS,
                "to": (low + 1) / CALIBRATION_BINS,
                "nodes": int(nodes),
                "estimate": total / nodes if nodes else None,
                "accepted": accepted / nodes if nodes else None,
            }
            for low, (nodes, total, accepted) in enumerate(task.bins)
        ],
    }


def whole(result: ReplayResult) -> TaskResult:
    """All tasks as one."""
    total = TaskResult()
    for task in result.tasks.values():
        total.rows += task.rows
        total.tokens += task.tokens
        total.calls += task.calls
        total.nodes += task.nodes
        total.accepted += task.accepted
        total.draft_us += task.draft_us
        for into, cell in zip(total.bins, task.bins, strict=True):
            for i, value in enumerate(cell):
                into[i] += value
    return total


def result_json(result: ReplayResult) -> dict[str, Any]:
    """A replay's figures, for `json.dump`."""
    return {
        "tasks": {name: task_json(task, result) for name, task in result.tasks.items()},
        "all": task_json(whole(result), result),
        "geometric_mean": result.geometric_mean,
        "insert_ms_max": result.insert_ms_max,
    }


def ratio_json(result: ReplayResult, other: ReplayResult) -> dict[str, float]:
    """Tokens per call of `result` over those of `other`, per task and for the geometric mean."""
    found = {name: task.tokens_per_call / other.tasks[name].tokens_per_call for name, task in result.tasks.items()}
    found["geometric mean"] = result.geometric_mean / other.geometric_mean
    return found


def table(result: ReplayResult, name: str, other: ReplayResult | None = None, other_name: str = "") -> str:
    """A replay as text, one line a task; with `other`, its tokens per call and the ratio beside."""
    heads = ["task", "rows", "tokens/call", "nodes/call", "accepted", "draft us p50", "p99"]
    if other is not None:
        heads += [other_name, "ratio"]
    lines = [heads]
    ratios = ratio_json(result, other) if other is not None else {}
    for task_name, task in [*result.tasks.items(), ("all", whole(result))]:
        line = [
            task_name,
            str(task.rows),
            f"{task.tokens_per_call:.3f}",
            f"{task.nodes / max(task.calls, 1):.1f}",
            f"{100 * task.accepted / max(task.nodes, 1):.1f} %",
            f"{quantile(task.draft_us, 0.5) or 0:.0f}",
            f"{quantile(task.draft_us, 0.99) or 0:.0f}",
        ]
        if other is not None:
            rival = other.tasks[task_name] if task_name in other.tasks else whole(other)
            line += [f"{rival.tokens_per_call:.3f}", f"{task.tokens_per_call / rival.tokens_per_call:.3f}"]
        lines.append(line)
    mean = ["geometric mean", "", f"{result.geometric_mean:.3f}", "", "", "", ""]
    if other is not None:
        mean += [f"{other.geometric_mean:.3f}", f"{ratios['geometric mean']:.3f}"]
    lines.append(mean)
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    text = [name]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        text.append("  ".join(cells).rstrip())
    text.append(_memory_line(result))
    text.append(_calibration_line(whole(result)))
    return "\n".join(line for line in text if line)


def _memory_line(result: ReplayResult) -> str:
    if result.insert_us_per_token is None or result.nodes is None:
        return ""
    size = f", {result.bytes_per_token:.0f} bytes a token" if result.bytes_per_token is not None else ""
    return (
        f"shared memory: {result.nodes} nodes{size}; insert {result.insert_us_per_token:.1f} us a token, "
        f"slowest document {result.insert_ms_max:.1f} ms"
    )


def _calibration_line(total: TaskResult) -> str:
    cells = [f"{s / n:.2f}->{a / n:.2f}" for n, s, a in total.bins if n]
    return "estimated->accepted: " + "  ".join(cells) if cells else ""


def plot(curves: dict[str, dict[str, list[tuple[int, float]]]], path: str | os.PathLike[str], title: str = "") -> None:
    """Draws tokens per call against budget, one panel a task.

    Args:
      curves: `{drafter: {task: [(budget, tokens per call), ...]}}`.
      path: where to write; the ending decides the format.
      title: what to write above.

    Raises:
      ImportError: matplotlib isn't installed.
      ValueError: the ending names no format.
      OSError: the file can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(task for of in curves.values() for task in of))
    columns = min(3, max(len(tasks), 1))
    rows = max(-(-len(tasks) // columns), 1)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False)
    try:
        for axis in axes.flat[len(tasks) :]:
            axis.set_visible(False)
        for axis, task in zip(axes.flat, tasks, strict=False):
            for name, of in curves.items():
                points = of.get(task, [])
                axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
            axis.set_xscale("log", base=2)
            axis.set_title(task)
            axis.set_xlabel("budget (draft nodes)")
            axis.set_ylabel("tokens per call")
            axis.grid(alpha=0.3)
        axes.flat[0].legend()
        if title:
            figure.suptitle(title)
        figure.tight_layout()
        figure.savefig(path)
    finally:
        pyplot.close(figure)
