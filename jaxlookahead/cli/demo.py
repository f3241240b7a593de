"""`jaxlookahead demo`: a few prompts, decoded with and without drafting."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from jaxlookahead.cli import common

# Name, prompt, most new tokens.
PROMPTS = (
    (
        "answering",
        "Answer from the text. Text: The Bosporus is a strait that joins the Black Sea to the Sea of Marmara. It is "
        "about 31 kilometres long, and between 700 metres and 3.4 kilometres wide. Question: Which two seas does the "
        "Bosporus join, and how long is it? Quote the text in your answer.",
        96,
    ),
    (
        "code",
        "Write a Python class `Stack` with the methods push, pop, peek, is_empty and size, and then a class `Queue` "
        "with the methods enqueue, dequeue, peek, is_empty and size. Give only the code.",
        192,
    ),
    (
        "summarising",
        "Summarise the passage in two sentences.\n\nBees do not see red, but they see ultraviolet light, which people "
        "do not. Many flowers that look plain to us carry ultraviolet patterns that lead a bee to the nectar. A bee "
        "learns which patterns pay, and tells the others in the hive where they are by dancing. The dance gives the "
        "direction against the sun and the distance, and a good dancer may send a hundred bees to the same field.",
        96,
    ),
    (
        "editing",
        "Rename the variable `d` to `total` and return the whole function.\n```python\ndef invoice(lines, rate):\n"
        "    d = 0\n    for line in lines:\n        if line.quantity <= 0:\n"
        "            raise ValueError('quantity must be positive')\n        d += line.quantity * line.price\n"
        "    d += d * rate\n    return round(d, 2)\n```",
        144,
    ),
    (
        "maths",
        "A baker sells 24 loaves in the morning and half as many in the afternoon. Each loaf costs 3 dollars. How "
        "much does the baker earn that day, and how much in a week of 6 such days? Think step by step.",
        160,
    ),
    (
        "chat",
        "I want to start running in the morning. Can you help me make a plan for the first four weeks?",
        192,
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    common.add_model_arguments(parser)
    common.add_draft_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one object for each prompt, and a total")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from jaxlookahead import warm_up
    from jaxlookahead.checkpoints.tokenizer import chat_ids
    from jaxlookahead.drafters.registry import make_drafter

    loaded = common.load_model(arguments)
    prompts = [chat_ids(loaded.tokenizer, [{"role": "user", "content": text}]) for _, text, _ in PROMPTS]
    longest = max(len(ids) + limit for ids, (_, _, limit) in zip(prompts, PROMPTS, strict=True))
    print("compiling ...", file=sys.stderr)
    warm_up(loaded.model, loaded.params, tokens=longest, width=arguments.width, eos_size=max(len(loaded.eos_ids), 1))
    drafter = make_drafter(arguments.drafter)
    rows = []
    for (name, _, limit), ids in zip(PROMPTS, prompts, strict=True):
        row, output = compare(loaded, ids, limit, drafter, arguments)
        rows.append({"name": name, **row})
        if arguments.json:
            print(json.dumps(rows[-1]), flush=True)
        else:
            _print_response(name, loaded, ids, output)
    total = summarize(rows)
    if arguments.json:
        print(json.dumps(total))
    else:
        _print_table([*rows, total])
    return 0 if total["identical"] else 1


def compare(
    loaded: Any, ids: list[int], limit: int, drafter: Any, arguments: argparse.Namespace
) -> tuple[dict[str, Any], Any]:
    """Decodes a prompt without and with drafting. Returns the figures and the drafted response."""
    from jaxlookahead import first_difference, generate

    results, seconds = [], []
    for use in (None, drafter):
        start = time.perf_counter()
        result = generate(
            loaded.model,
            loaded.params,
            [ids],
            max_new_tokens=limit,
            eos_ids=loaded.eos_ids,
            drafter=use,
            width=arguments.width,
            adapt=not arguments.no_adapt,
        )
        seconds.append(time.perf_counter() - start)
        results.append(result[0])
    plain, drafted = results
    difference = first_difference(plain, drafted)
    tokens = len(drafted.tokens)
    row = {
        "tokens": tokens,
        "calls": drafted.stats.steps,
        "tokens_per_call": tokens / drafted.stats.steps,
        "plain_tokens_per_s": len(plain.tokens) / seconds[0],
        "lookahead_tokens_per_s": tokens / seconds[1],
        "speedup": tokens / seconds[1] / (len(plain.tokens) / seconds[0]),
        "identical": difference is None,
        "min_margin": float(drafted.margins.min()),
        "difference": None if difference is None else {"position": difference.position, "margin": difference.margin},
        "plain_seconds": seconds[0],
        "lookahead_seconds": seconds[1],
    }
    return row, drafted


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The totals of `compare`'s rows."""
    tokens, calls = (sum(row[key] for row in rows) for key in ("tokens", "calls"))
    plain, lookahead = (sum(row[f"{key}_seconds"] for row in rows) for key in ("plain", "lookahead"))
    plain_tokens = sum(row["plain_tokens_per_s"] * row["plain_seconds"] for row in rows)
    return {
        "name": "total",
        "tokens": tokens,
        "calls": calls,
        "tokens_per_call": tokens / calls,
        "plain_tokens_per_s": plain_tokens / plain,
        "lookahead_tokens_per_s": tokens / lookahead,
        "speedup": tokens / lookahead / (plain_tokens / plain),
        "identical": all(row["identical"] for row in rows),
        "min_margin": min(row["min_margin"] for row in rows),
        "plain_seconds": plain,
        "lookahead_seconds": lookahead,
    }


def _print_response(name: str, loaded: Any, ids: list[int], output: Any) -> None:
    from rich.console import Console
    from rich.rule import Rule

    from jaxlookahead import show

    console = Console()
    console.print(Rule(name))
    console.print(show.coloured(common.without_end(output), loaded.tokenizer), soft_wrap=True)


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        caption="coloured text: tokens that a draft had proposed and the model confirmed",
        # Without lines between the columns it fits 80 characters.
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("prompt", no_wrap=True)
    for title in ("tokens", "calls", "tokens\na call", "plain\ntokens/s", "lookahead\ntokens/s", "speed-up"):
        table.add_column(title, justify="right")
    table.add_column("identical", no_wrap=True)
    for row in rows:
        if row["identical"]:
            same = "yes"
        elif row.get("difference"):
            same = f"from token {row['difference']['position']}, margin {row['difference']['margin']:.1e}"
        else:
            same = "no"
        table.add_row(
            row["name"],
            str(row["tokens"]),
            str(row["calls"]),
            f"{row['tokens_per_call']:.2f}",
            f"{row['plain_tokens_per_s']:.1f}",
            f"{row['lookahead_tokens_per_s']:.1f}",
            f"{row['speedup']:.2f}",
            same,
        )
    # Narrower, rich cuts the titles of the columns.
    Console().print(table)
