"""Tokens per call of each source of drafts, alone and left out: `python -m jaxlookahead.bench.sources TRACES`.

Requests of a task are decoded one after another with whole drafts of one width; past responses are the warm lines'
recorded ones and those of the requests before. Calls are counted, not timed. As the recorded responses are the model's
own, the text is scored once for all drafters; what the model says along other branches, which successors and guesses
learn from, is computed where a draft asks for it, once for each branch. So the counts are those of decoding.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlookahead import cache as caches
from jaxlookahead.drafters.guesses import GuessPool
from jaxlookahead.drafters.prompt_lookup import PromptLookup
from jaxlookahead.drafters.protocol import Draft, Drafter
from jaxlookahead.drafters.trie import TrieDrafter
from jaxlookahead.models.protocol import Model, Params
from jaxlookahead.replay.run import walk
from jaxlookahead.step import prefill
from jaxlookahead.tree import normalize

SOURCES = ("request", "shared", "successors", "guesses")
TOPK = 8
_CHUNK = 64
_NARROWEST = 4


def make_drafters() -> dict[str, Drafter]:
    """All sources, each alone, each left out, those that need nothing of the model, and prompt lookup."""

    def trie(names: Sequence[str]) -> TrieDrafter:
        return TrieDrafter(
            use_request="request" in names,
            use_shared="shared" in names,
            successors=TOPK * ("successors" in names),
            sources=[GuessPool()] if "guesses" in names else [],
        )

    drafters: dict[str, Drafter] = {"all": trie(SOURCES)}
    for name in SOURCES:
        drafters[f"{name} alone"] = trie([name])
    for name in SOURCES:
        drafters[f"without {name}"] = trie([other for other in SOURCES if other != name])
    drafters["request, shared"] = trie(["request", "shared"])
    drafters["prompt lookup"] = PromptLookup()
    return drafters


@functools.cache
def _compiled(model: Model) -> tuple[Any, Any, Any]:
    def fill(params: Params, cache: Any, tokens: jax.Array, start: jax.Array) -> Any:
        return prefill(model, params, cache, tokens, start)[1]

    def read(params: Params, cache: Any, tokens: jax.Array, start: jax.Array) -> Any:
        logits, cache = prefill(model, params, cache, tokens, start)
        return lax.top_k(logits[0], TOPK)[1], cache

    def score(params: Params, cache: Any, tokens: jax.Array, positions: jax.Array, mask: jax.Array) -> Any:
        start = jnp.int32(mask.shape[-1] - tokens.shape[-1])
        logits, cache = model.forward(params, tokens, positions, mask, cache, start)
        return lax.top_k(logits[0], TOPK)[1], cache

    return tuple(jax.jit(function, donate_argnums=1) for function in (fill, read, score))


class Answers:
    """The model's likeliest next tokens along one recorded text and off it.

    Attributes:
      along: `along[i]` are those at the place of `response[i]`, likeliest first.
    """

    def __init__(self, model: Model, params: Params, prompt: Sequence[int], response: Sequence[int]) -> None:
        self._model, self._params, self._response = model, params, response
        self._text = [*prompt, *response]
        self._start = len(prompt)
        slots = caches.slots_for(len(self._text) + 2 * _CHUNK)
        self._cache = model.init_cache(1, slots)
        self._slots = slots
        self._off: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        fill, read, _ = _compiled(model)
        ahead = self._start - 1
        for start in range(0, ahead, _CHUNK):
            self._cache = fill(params, self._cache, self._chunk(start, ahead), jnp.int32(start))
        self.along: list[list[int]] = []
        for start in range(ahead, len(self._text) - 1, _CHUNK):
            top, self._cache = read(params, self._cache, self._chunk(start, len(self._text)), jnp.int32(start))
            self.along += np.asarray(top).tolist()
        del self.along[len(response) :]

    def _chunk(self, start: int, stop: int) -> np.ndarray:
        tokens = np.zeros((1, _CHUNK), np.int32)
        part = self._text[start : min(stop, start + _CHUNK)]
        tokens[0, : len(part)] = part
        return tokens

    def topk(self, done: int, draft: Draft, accepted: Sequence[int]) -> list[list[int]]:
        """What the step returns for a draft: a row for the newest token, then one for each node.

        Args:
          done: tokens of the response so far.
          draft: what is verified after them.
          accepted: its nodes that the response follows.
        """
        on_path = {node: done + depth for depth, node in enumerate(accepted, 1)}
        keys: list[tuple[int, tuple[int, ...]]] = []
        missing: set[int] = set()
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            if node in on_path:
                keys.append((on_path[node], ()))
                continue
            at, path = keys[parent] if parent >= 0 else (done, ())
            keys.append((at, (*path, token)))
            if keys[node] not in self._off:
                above = node
                while above >= 0 and above not in on_path and above not in missing:
                    missing.add(above)
                    above = draft.parents[above]
        if missing:
            self._score(sorted(missing), draft, keys)
        return [self.along[done], *(self._off[key] if key[1] else self._at(key[0]) for key in keys)]

    def _at(self, place: int) -> list[int]:
        # After the last token of the response nothing is ever asked.
        return self.along[place] if place < len(self.along) else [0] * TOPK

    def _score(self, nodes: list[int], draft: Draft, keys: list[tuple[int, tuple[int, ...]]]) -> None:
        width = max(_NARROWEST, 1 << (len(nodes) - 1).bit_length())
        tokens = np.zeros((1, width), np.int32)
        positions = np.zeros((1, width), np.int32)
        mask = np.zeros((1, width, self._slots), bool)
        scratch = self._slots - width
        place = {node: i for i, node in enumerate(nodes)}
        mask[0, np.arange(width), scratch + np.arange(width)] = True
        for node, i in place.items():
            at, path = keys[node]
            tokens[0, i] = draft.tokens[node]
            positions[0, i] = self._start + at + len(path) - 1
            mask[0, i, : self._start + at] = True
            above = draft.parents[node]
            while above in place:
                mask[0, i, scratch + place[above]] = True
                above = draft.parents[above]
        top, self._cache = _compiled(self._model)[2](self._params, self._cache, tokens, positions, mask)
        for node, row in zip(nodes, np.asarray(top).tolist(), strict=False):
            self._off[keys[node]] = row


def count_calls(
    drafter: Drafter, request: Hashable, prompt: Sequence[int], answers: Answers, response: Sequence[int], width: int
) -> int:
    """The steps that `generate` takes for a request, the drafter told what `generate` tells it."""
    model = answers._model
    wants_topk = getattr(drafter, "wants_topk", 0)
    drafter.begin(request, prompt)
    done = calls = 0
    newest = prompt[-1]
    while done < len(response):
        depth = len(response) - done - 1
        draft = Draft()
        if depth:
            found = drafter.draft(request, width - 1, depth)
            draft = normalize(found, budget=width - 1, max_depth=depth, vocab_size=model.vocab_size)
        accepted = walk(draft, response, done)
        if wants_topk:
            rows = answers.topk(done, draft, accepted)
            drafter.observe_topk(request, [newest, *draft.tokens], [row[:wants_topk] for row in rows])
        drafter.verified(request, draft, accepted)
        emitted = list(response[done : done + len(accepted) + 1])
        drafter.extend(request, emitted)
        done += len(emitted)
        newest = emitted[-1]
        calls += 1
    drafter.end(request)
    return calls


def measure(
    model: Model,
    params: Params,
    requests: Sequence[dict[str, Any]],
    warm: Sequence[Sequence[int]],
    width: int,
    drafters: dict[str, Drafter],
) -> dict[str, float]:
    """Tokens per call of every drafter over the requests of one task, in order."""
    for drafter in drafters.values():
        if isinstance(drafter, TrieDrafter) and drafter.use_shared:
            for response in warm:
                drafter.insert(response)
    calls = dict.fromkeys(drafters, 0)
    for i, request in enumerate(requests):
        answers = Answers(model, params, request["prompt"], request["response"])
        for name, drafter in drafters.items():
            calls[name] += count_calls(drafter, i, request["prompt"], answers, request["response"], width)
    tokens = sum(len(request["response"]) for request in requests)
    return {name: tokens / count for name, count in calls.items()}


def main() -> None:
    """Prints one line of JSON for each task, and the geometric means."""
    from jaxlookahead.checkpoints.load import load

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", help="JSONL with task, split, prompt, response (token ids of the model)")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--limit", type=int, default=12, help="requests for each task (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each response (%(default)s)")
    parser.add_argument("--width", type=int, default=16, help="%(default)s")
    arguments = parser.parse_args()
    with open(arguments.traces, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    loaded = load(arguments.model, tokenizer=None)
    table = {}
    for task in sorted({row["task"] for row in rows}):
        mine = [row for row in rows if row["task"] == task]
        tests = [row for row in mine if row["split"] == "test"][: arguments.limit]
        tests = [row | {"response": row["response"][: arguments.max_new_tokens]} for row in tests]
        warm = [row["response"] for row in mine if row["split"] == "warm"]
        table[task] = measure(loaded.model, loaded.params, tests, warm, arguments.width, make_drafters())
        print(json.dumps({"task": task, **{name: round(value, 3) for name, value in table[task].items()}}), flush=True)
    names = next(iter(table.values()))
    means = {name: float(np.exp(np.mean([np.log(row[name]) for row in table.values()]))) for name in names}
    print(json.dumps({"task": "geometric mean", **{name: round(value, 3) for name, value in means.items()}}))


if __name__ == "__main__":
    main()
