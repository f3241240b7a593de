"""`jaxlookahead bench`: plain against lookahead decoding, end to end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from jaxlookahead.bench.peers import PEERS, make_peers
from jaxlookahead.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    common.add_model_arguments(parser)
    common.add_draft_arguments(parser, several=True)
    common.add_sampling_arguments(parser)
    parser.add_argument(
        "file",
        help="JSONL; a line has `text` or token ids `prompt`, and may have `name`, `task`, `max_new_tokens`, "
        "`response` (token ids) and `split`: lines of split `warm` only warm the memory with their responses",
    )
    parser.epilog = (
        "Columns: tokens per call; draft nodes a call; speed-up over plain and its 95 % interval; shares of the time "
        "in prefill, drafting and steps, and of that waiting for the device; peak memory; responses that differ from "
        "plain's (in brackets: not by a near-tie)."
    )
    parser.add_argument(
        "--memory", action="append", choices=("cold", "self", "warm"), help="cold by default; repeatable"
    )
    parser.add_argument("--tasks", help="only these, separated by commas")
    parser.add_argument("--limit", type=common.positive, help="prompts for each task")
    parser.add_argument("--max-new-tokens", type=common.positive, metavar="N", help="lowers the lines' own")
    parser.add_argument(
        "--rows",
        type=common.positives,
        default=[1],
        metavar="N,...",
        help="prompts decoded together (1)",
    )
    parser.add_argument(
        "--against", action="append", choices=PEERS, help="also run this decoder, on the CPU; repeatable"
    )
    parser.add_argument("--repeats", type=common.positive, default=1, help="%(default)s")
    parser.add_argument("--json", action="store_true", help="print one object for each task and method")
    parser.add_argument("--plot", metavar="FILE", help="draw the speed-ups (needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from jaxlookahead.bench import decode

    sampling = common.sampling(arguments)
    if arguments.against and (arguments.rows != [1] or sampling is not None):
        raise common.UsageError("--against decodes greedily, one prompt at a time: leave out --rows and --temperature")
    if "warm" in (arguments.memory or ()) and "prompt_lookup" in (arguments.drafter or ()):
        raise common.UsageError("--memory warm needs drafters with a memory: leave out --drafter prompt_lookup")
    if arguments.plot is not None:
        common.check_plot(arguments.plot)
    lines = _selected(_read(arguments.file), arguments)
    loaded = common.load_model(arguments)
    requests, warm = _requests(lines, loaded, arguments)
    methods = [decode.Method("plain")]
    for drafter in arguments.drafter or ["trie"]:
        for memory in arguments.memory or ["cold"]:
            methods.append(decode.Method(f"{drafter}, {memory}", drafter, memory))
    for name in arguments.against or ():
        methods += [decode.Method(title, peer=peer) for title, peer in make_peers(name, loaded).items()]
    table = []
    for rows in arguments.rows:
        runs = decode.measure(
            loaded,
            requests,
            methods,
            warm=warm,
            rows=rows,
            repeats=arguments.repeats,
            width=arguments.width,
            adapt=not arguments.no_adapt,
            sampling=sampling,
            progress=lambda line: print(line, file=sys.stderr),
        )
        table += [{"rows": rows} | row for row in decode.summarize(runs, methods[0].name)]
    if arguments.json:
        for row in table:
            print(json.dumps(row))
    else:
        _print_table(table)
    if arguments.plot:
        _plot(table, arguments.plot)
    return 0


# What a line may hold, and how that is called.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda x: isinstance(x, str), "a string"),
    "task": (lambda x: isinstance(x, str), "a string"),
    "text": (lambda x: isinstance(x, str), "a string"),
    "split": (lambda x: isinstance(x, str), "a string"),
    "prompt": (lambda x: _are_tokens(x) and len(x) > 0, "a list of token ids, not empty"),
    "response": (lambda x: _are_tokens(x), "a list of token ids"),
    "max_new_tokens": (lambda x: type(x) is int and x > 0, "an integer of at least 1"),
}


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)


def _read(path: str) -> list[dict[str, Any]]:
    lines = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = _parse(line, f"{path}, line {number}")
                    lines.append({"name": f"line {number}", "task": "all", **row, "where": f"{path}, line {number}"})
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from None
    return lines


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    if not isinstance(row, dict) or not ("text" in row or "prompt" in row):
        raise ValueError(f"{where} needs a field `text` or `prompt`")
    for field, (is_right, wanted) in _FIELDS.items():
        if field in row and not is_right(row[field]):
            shown = json.dumps(row[field])
            raise ValueError(
                f"{where}: field `{field}` must be {wanted}, got {shown if len(shown) < 60 else shown[:56] + ' ...'}"
            )
    return row


def _selected(lines: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The lines of the tasks that are wanted."""
    wanted = set(arguments.tasks.split(",")) if arguments.tasks else {line["task"] for line in lines}
    unknown = wanted - {line["task"] for line in lines}
    if unknown:
        raise ValueError(f"--tasks names {sorted(unknown)}, which {arguments.file} does not hold")
    lines = [line for line in lines if line["task"] in wanted]
    if all(line.get("split") == "warm" for line in lines):
        raise ValueError(f"{arguments.file} holds no prompt to decode")
    return lines


def _requests(
    lines: list[dict[str, Any]], loaded: Any, arguments: argparse.Namespace
) -> tuple[list[Any], dict[str, list[list[int]]]]:
    from jaxlookahead.bench.decode import Request
    from jaxlookahead.checkpoints.tokenizer import chat_ids

    requests: list[Any] = []
    warm: dict[str, list[list[int]]] = {}
    for line in lines:
        if line.get("split") == "warm":
            if "response" in line:
                warm.setdefault(line["task"], []).append(line["response"])
            continue
        if sum(request.task == line["task"] for request in requests) == arguments.limit:
            continue
        ids = (
            line["prompt"]
            if "prompt" in line
            else chat_ids(loaded.tokenizer, [{"role": "user", "content": line["text"]}])
        )
        if max(ids) >= loaded.model.vocab_size:
            raise ValueError(
                f"{line['where']}: the prompt holds token id {max(ids)}, but the model's vocabulary has "
                f"{loaded.model.vocab_size} ids, from 0"
            )
        limit = line.get("max_new_tokens") or len(line.get("response", ())) or 128
        requests.append(Request(line["name"], line["task"], ids, min(limit, arguments.max_new_tokens or limit)))
    return requests, warm


def _print_table(table: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    out = Table()
    several = len({row["rows"] for row in table}) > 1
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("per call", lambda row: f"{row['tokens_per_call']:.2f}"),
        ("nodes", lambda row: f"{row['nodes_per_call']:.1f}"),
        ("tokens/s", lambda row: f"{row['tokens_per_s']:.1f}"),
        ("speed-up", lambda row: f"{row['speedup']:.2f}"),
        ("95 %", lambda row: f"{row['low']:.2f}-{row['high']:.2f}"),
        ("prefill", lambda row: f"{row['prefill_share']:.0%}"),
        ("draft", lambda row: f"{row['draft_share']:.1%}"),
        ("step", lambda row: f"{row['step_share']:.0%}"),
        ("wait", lambda row: f"{row['wait_share']:.0%}"),
        ("GiB", lambda row: f"{row['peak_memory_bytes'] / 2**30:.2f}"),
        ("differ", lambda row: f"{row['different']} ({row['unexplained']})"),
    ]
    for title in ("task", "method", *(["rows"] if several else [])):
        out.add_column(title, no_wrap=True)
    for title, _ in columns:
        out.add_column(title, justify="right")
    for row in table:
        cells = []
        for _, cell in columns:
            # A peer tells only some, and a mean over tasks is one of speed-ups.
            try:
                cells.append(cell(row))
            except KeyError:
                cells.append("")
        out.add_row(row["task"], row["method"], *([str(row["rows"])] if several else []), *cells)
    Console(width=max(Console().width, 140)).print(out)


def _plot(table: list[dict[str, Any]], path: str) -> None:
    from matplotlib.figure import Figure

    several = len({row["rows"] for row in table}) > 1
    rows = [row | ({"task": f"{row['task']}, {row['rows']}"} if several else {}) for row in table if "tokens" in row]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure = Figure(figsize=(1.5 + 1.2 * len(tasks), 4), layout="constrained")
    axes = figure.subplots()
    for i, method in enumerate(methods):
        mine = [row for row in rows if row["method"] == method]
        at = [tasks.index(row["task"]) + (i - (len(methods) - 1) / 2) * 0.8 / len(methods) for row in mine]
        errors = [
            [max(row["speedup"] - row["low"], 0) for row in mine],
            [max(row["high"] - row["speedup"], 0) for row in mine],
        ]
        axes.bar(at, [row["speedup"] for row in mine], 0.8 / len(methods), yerr=errors, label=method)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(tasks)), tasks, rotation=20, ha="right")
    axes.set_ylabel("tokens/s against plain decoding")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path)
