"""`jaxlookahead replay`: recorded responses against a drafter, without a model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from jaxlookahead.cli import common
from jaxlookahead.drafters.protocol import Drafter
from jaxlookahead.replay.drafters import NAMED, drafter_factory
from jaxlookahead.replay.report import plot, ratio_json, result_json, table
from jaxlookahead.replay.run import ReplayResult, replay
from jaxlookahead.replay.traces import read_traces

PLOT_BUDGETS = (1, 2, 4, 8, 16, 32, 64)


def _positive(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 1_000_000_000:
        raise argparse.ArgumentTypeError(f"{text} must be from 1 to 1000000000")
    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    names = f"{', '.join(NAMED)}, or package.module:callable (default trie)"
    add = parser.add_argument
    add(
        "traces",
        metavar="TRACES",
        help="JSONL; a line has `task`, and `prompt` and `response` as token ids, and may have `name` and "
        "`split`: lines of split `warm` are only remembered",
    )
    add("--budget", type=_positive, default=32, help="draft nodes a step (default 32)")
    add("--max-depth", type=_positive, default=64, help="deepest draft (default 64)")
    add("--drafter", default="trie", metavar="NAME", help=names)
    add("--mode", choices=("tree", "parallel", "single"), help="how trie drafts branch")
    add("--against", metavar="NAME", help="a second drafter, replayed for comparison")
    add("--cold", action="store_true", help="leave the warm rows out")
    add("--isolated", action="store_true", help="keep nothing between requests")
    add(
        "--fill",
        type=_positive,
        default=0,
        metavar="TOKENS",
        help="first remember this much varied warm text",
    )
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--plot", metavar="FILE", help="draw tokens per call against budget, per task")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      0.

    Raises:
      ValueError: the traces can't be used, an option has no meaning here, or the plot can't be written.
    """
    drafters = {args.drafter: drafter_factory(args.drafter, mode=args.mode)}
    if args.against is not None:
        if args.against == args.drafter and args.mode is None:
            raise ValueError(f"--against {args.against} is the drafter itself")
        mode = args.mode if args.against.startswith("trie") and args.against != args.drafter else None
        name = args.against if args.against != args.drafter else f"{args.against} (default mode)"
        drafters[name] = drafter_factory(args.against, mode=mode)
    traces = read_traces(args.traces)
    if not any(row.split == "test" for row in traces):
        raise ValueError(f"{args.traces} has no rows with split 'test'")
    if args.fill and (args.cold or args.isolated or not any(row.split == "warm" for row in traces)):
        raise ValueError("--fill varies the warm rows, which are missing or left out here")
    if args.plot is not None:
        common.check_plot(args.plot)

    def measure(make: Callable[[], Drafter], budget: int) -> ReplayResult:
        return replay(
            make,
            traces,
            budget=budget,
            max_depth=args.max_depth,
            cold=args.cold,
            isolated=args.isolated,
            fill=args.fill,
        )

    results = {name: measure(make, args.budget) for name, make in drafters.items()}
    (name, result), *others = results.items()
    if args.json:
        report: dict[str, Any] = {
            "traces": args.traces,
            "drafter": name,
            "mode": args.mode,
            "budget": args.budget,
            "memory": "isolated" if args.isolated else "cold" if args.cold else "warm",
            **result_json(result),
        }
        for rival, rival_result in others:
            report["against"] = {"drafter": rival, **result_json(rival_result)}
            report["ratio"] = ratio_json(result, rival_result)
        print(json.dumps(report, indent=1))
    else:
        memory = "nothing kept" if args.isolated else "cold" if args.cold else "warm"
        title = f"{name}, budget {args.budget}, {memory}"
        if others:
            print(table(result, title, others[0][1], others[0][0]))
        else:
            print(table(result, title))
    if args.plot is not None:
        curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
        for drafter_name, make in drafters.items():
            for budget in PLOT_BUDGETS:
                found = results[drafter_name] if budget == args.budget else measure(make, budget)
                for task, figures in found.tasks.items():
                    points = curves.setdefault(drafter_name, {}).setdefault(task, [])
                    points.append((budget, figures.tokens_per_call))
        try:
            plot(curves, args.plot, "tokens per call by budget")
        except OSError as error:
            raise ValueError(f"can't write {args.plot}: {error.strerror or error}") from None
    return 0
