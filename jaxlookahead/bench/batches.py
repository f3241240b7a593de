"""Batches of requests of mixed length: `python -m jaxlookahead.bench.batches TRACES`.

Three ways to decode the same requests, in turn for each number of rows:

- `plain, static`: groups of so many requests as there are rows, each group run to its end before the next;
- `plain`: as one request ends, the next takes its row;
- `drafted`: the same with drafts from a trie that starts empty.

Requests are of mixed length by their number of new tokens, spread evenly on a logarithmic scale; end-of-sequence ids
are ignored, so that all three decode as many tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxlookahead.decoding import generate
from jaxlookahead.drafters.trie import TrieDrafter
from jaxlookahead.results import Output, Stats, first_difference

METHODS = ("plain, static", "plain", "drafted")


def mixed_lengths(count: int, shortest: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths from `shortest` to `longest`, evenly spaced on a logarithmic scale, shuffled."""
    lengths = np.rint(np.geomspace(shortest, longest, count)).astype(int)
    return np.random.default_rng(seed).permutation(lengths).tolist()


def measure(
    model: Any,
    params: Any,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *,
    rows: Sequence[int] = (1, 4, 8, 16),
    width: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Decodes all requests by each method.

    Before it is timed, each method decodes the first requests of every length that is met, a few tokens each, which
    compiles most of what it needs. What still compiles while it is timed is told apart by `compiled`.

    Args:
      model: the model.
      params: its parameters.
      prompts: token ids of each request.
      lengths: tokens to decode of each.
      rows: numbers of rows to try.
      width: see `generate`.
      progress: called with a line of text now and then.

    Returns:
      For each number of rows and method: `rows`, `method`, `tokens`, `seconds`, `tokens_per_s`, `tokens_per_call`,
      `steps`, `prefill_share` (of the time), `to_plain` (tokens/s to those of `plain` at as many rows), `different`
      (responses that differ from plain's) and `compiled` (calls traced while timed).
    """
    from jaxlookahead.engine import TRACES

    table = []
    for slots in rows:
        found: dict[str, dict[str, Any]] = {}
        outputs: dict[str, list[Output]] = {}
        for method in METHODS:
            _decode(method, model, params, prompts, [min(n, 12) for n in lengths], slots, width)
        for method in METHODS:
            traced = sum(TRACES.values())
            start = time.perf_counter()
            outputs[method], stats = _decode(method, model, params, prompts, lengths, slots, width)
            seconds = time.perf_counter() - start
            tokens = sum(len(output.tokens) for output in outputs[method])
            found[method] = {
                "rows": slots,
                "method": method,
                "tokens": tokens,
                "seconds": seconds,
                "tokens_per_s": tokens / seconds,
                "tokens_per_call": tokens / sum(part.row_steps for part in stats),
                "steps": sum(part.steps for part in stats),
                "prefill_share": sum(part.prefill_seconds for part in stats) / seconds,
                "compiled": sum(TRACES.values()) - traced,
            }
            progress(f"{slots} rows, {method}: {seconds:.1f} s")
        for method, row in found.items():
            pairs = zip(outputs["plain"], outputs[method], strict=True)
            row["to_plain"] = row["tokens_per_s"] / found["plain"]["tokens_per_s"]
            row["different"] = sum(first_difference(a, b) is not None for a, b in pairs)
            table.append(row)
    return table


def _decode(
    method: str,
    model: Any,
    params: Any,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    rows: int,
    width: int | None,
) -> tuple[list[Output], list[Stats]]:
    """The responses, and the statistics of each group."""
    drafter = TrieDrafter() if method == "drafted" else None
    group = rows if method == "plain, static" else len(prompts)
    outputs: list[Output] = []
    stats: list[Stats] = []
    for start in range(0, len(prompts), group):
        part = slice(start, start + group)
        done = generate(
            model, params, prompts[part], max_new_tokens=lengths[part], drafter=drafter, rows=rows, width=width
        )
        outputs += done
        stats.append(done.stats)
    return outputs, stats


def show(table: Sequence[dict[str, Any]]) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    out = Table(
        "rows", "method", "tokens", "steps", "per call", "tokens/s", "to plain", "prefill", "differ", "compiled"
    )
    for row in table:
        out.add_row(
            str(row["rows"]),
            row["method"],
            str(row["tokens"]),
            str(row["steps"]),
            f"{row['tokens_per_call']:.2f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['to_plain']:.2f}",
            f"{row['prefill_share']:.0%}",
            str(row["different"]),
            str(row["compiled"]),
        )
    Console(width=max(Console().width, 100)).print(out)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m jaxlookahead.bench.batches", description=__doc__.splitlines()[0])
    parser.add_argument("traces", help="JSONL with `prompt`, token ids")
    parser.add_argument("--rows", default="1,4,8,16", help="%(default)s")
    parser.add_argument("--requests", type=int, default=64, help="%(default)s")
    parser.add_argument("--shortest", type=int, default=10, help="new tokens (%(default)s)")
    parser.add_argument("--longest", type=int, default=100, help="new tokens (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=120, help="leave out longer prompts (%(default)s)")
    parser.add_argument("--width", type=int, help="most tokens scored in a step for each row")
    parser.add_argument("--json", action="store_true", help="print one object for each row of the table")
    options = parser.parse_args()

    from jaxlookahead.checkpoints.load import load

    with open(options.traces, encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    prompts = [prompt for prompt in prompts if len(prompt) <= options.prompt_tokens]
    if len(prompts) < options.requests:
        raise SystemExit(f"{options.traces} holds {len(prompts)} prompts of at most {options.prompt_tokens} tokens")
    prompts = prompts[:: len(prompts) // options.requests][: options.requests]
    loaded = load(tokenizer=None)
    table = measure(
        loaded.model,
        loaded.params,
        prompts,
        mixed_lengths(options.requests, options.shortest, options.longest),
        rows=[int(rows) for rows in options.rows.split(",")],
        width=options.width,
        progress=lambda line: print(line, file=sys.stderr),
    )
    if options.json:
        for row in table:
            print(json.dumps(row))
    else:
        show(table)


if __name__ == "__main__":
    main()
