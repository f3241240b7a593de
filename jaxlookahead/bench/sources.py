"""Tokens per call of each source of drafts, alone and left out: `python -m jaxlookahead.bench.sources TRACES`.

Requests of a task are decoded on the model one after another with whole drafts of one width; past responses are the
warm lines' recorded ones and those of the requests before.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlookahead.decoding import generate
from jaxlookahead.drafters.prompt_lookup import PromptLookup
from jaxlookahead.drafters.protocol import Drafter
from jaxlookahead.drafters.trie import TrieDrafter

_SOURCES = {"request": "use_request", "shared": "use_shared", "successors": "successors"}


def make_drafters() -> dict[str, Drafter]:
    """All sources, each alone, each left out, and prompt lookup."""

    def trie(names: Sequence[str]) -> TrieDrafter:
        return TrieDrafter(
            use_request="request" in names, use_shared="shared" in names, successors=8 * ("successors" in names)
        )

    drafters: dict[str, Drafter] = {"all": trie(list(_SOURCES))}
    for name in _SOURCES:
        drafters[f"{name} alone"] = trie([name])
    for name in _SOURCES:
        drafters[f"without {name}"] = trie([other for other in _SOURCES if other != name])
    drafters["prompt lookup"] = PromptLookup()
    return drafters


def measure(
    loaded: Any, requests: Sequence[dict[str, Any]], warm: Sequence[Sequence[int]], width: int
) -> dict[str, float]:
    """Tokens per call of every drafter over the requests of one task."""
    out = {}
    for name, drafter in make_drafters().items():
        if isinstance(drafter, TrieDrafter) and drafter.use_shared:
            for response in warm:
                drafter.insert(response)
        tokens = calls = 0
        for request in requests:
            stats = generate(
                loaded.model,
                loaded.params,
                [request["prompt"]],
                max_new_tokens=len(request["response"]),
                eos_ids=loaded.eos_ids,
                drafter=drafter,
                width=width,
                adapt=False,
            ).stats
            tokens, calls = tokens + stats.tokens, calls + stats.steps
        out[name] = tokens / calls
    return out


def main() -> None:
    """Prints one line of JSON for each task, and the geometric means."""
    from jaxlookahead.checkpoints.load import load

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", help="JSONL with task, split, prompt, response (token ids of the model)")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--limit", type=int, default=12, help="requests for each task (%(default)s)")
    parser.add_argument("--width", type=int, default=16, help="%(default)s")
    arguments = parser.parse_args()
    with open(arguments.traces, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    loaded = load(arguments.model, tokenizer=None)
    table = {}
    for task in sorted({row["task"] for row in rows}):
        mine = [row for row in rows if row["task"] == task]
        tests = [row for row in mine if row["split"] == "test"][: arguments.limit]
        warm = [row["response"] for row in mine if row["split"] == "warm"]
        table[task] = measure(loaded, tests, warm, arguments.width)
        print(json.dumps({"task": task, **{name: round(value, 3) for name, value in table[task].items()}}), flush=True)
    names = next(iter(table.values()))
    means = {name: float(np.exp(np.mean([np.log(row[name]) for row in table.values()]))) for name in names}
    print(json.dumps({"task": "geometric mean", **{name: round(value, 3) for name, value in means.items()}}))


if __name__ == "__main__":
    main()
