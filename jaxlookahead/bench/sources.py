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
from collections.abc import Generator, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxlookahead import cache as caches
from jaxlookahead.drafters.guesses import GuessPool
from jaxlookahead.drafters.prompt_lookup import PromptLookup
from jaxlookahead.drafters.protocol import Draft, Drafter, topk_drafter
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

    jit = functools.partial(jax.jit, donate_argnums=1)
    return jit(fill), jit(read), jit(score)


Ask = tuple[int, Draft, Sequence[int]]
# A place off the text: how much of the response comes before it, and the tokens after that.
_Key = tuple[int, tuple[int, ...]]


class Answers:
    """The model's likeliest next tokens along one recorded text and off it.

    Attributes:
      along: `along[i]` are those at the place of `response[i]`, likeliest first.
    """

    def __init__(
        self, model: Model, params: Params, prompt: Sequence[int], response: Sequence[int], *, nodes: int
    ) -> None:
        """`nodes` is the most draft nodes that are ever asked for at once."""
        self._model, self._params = model, params
        self._text = [*prompt, *response]
        self._start = len(prompt)
        self._slots = caches.slots_for(len(self._text) + max(_CHUNK, _width(nodes)))
        self._cache = model.init_cache(1, self._slots)
        self._off: dict[_Key, list[int]] = {}
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

    def topk(self, asks: Sequence[Ask]) -> list[list[list[int]]]:
        """What steps return for drafts: for each a row for the newest token, then one for each node.

        Args:
          asks: `(done, draft, accepted)`: the tokens of the response so far, what is verified after them, and its
            nodes that the response follows.
        """
        keys = [self._keys(*ask) for ask in asks]
        missing = {key for row in keys for key in row if key[1] and key not in self._off}
        missing |= {(at, path[:n]) for at, path in missing for n in range(1, len(path))}
        if missing:
            self._score(sorted(missing))
        return [
            [self.along[ask[0]], *(self._off[key] if key[1] else self._at(key[0]) for key in row)]
            for ask, row in zip(asks, keys, strict=True)
        ]

    def _keys(self, done: int, draft: Draft, accepted: Sequence[int]) -> list[_Key]:
        on_path = {node: done + depth for depth, node in enumerate(accepted, 1)}
        keys: list[_Key] = []
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            at, path = keys[parent] if parent >= 0 else (done, ())
            keys.append((on_path[node], ()) if node in on_path else (at, (*path, token)))
        return keys

    def _at(self, place: int) -> list[int]:
        # After the last token of the response nothing is ever asked.
        return self.along[place] if place < len(self.along) else [0] * TOPK

    def _score(self, keys: list[_Key]) -> None:
        width = _width(len(keys))
        tokens = np.zeros((1, width), np.int32)
        positions = np.zeros((1, width), np.int32)
        mask = np.zeros((1, width, self._slots), bool)
        scratch = self._slots - width
        mask[0, np.arange(width), scratch + np.arange(width)] = True
        place = {key: i for i, key in enumerate(keys)}
        for (at, path), i in place.items():
            tokens[0, i] = path[-1]
            positions[0, i] = self._start + at + len(path) - 1
            mask[0, i, : self._start + at] = True
            for n in range(1, len(path)):
                mask[0, i, scratch + place[at, path[:n]]] = True
        top, self._cache = _compiled(self._model)[2](self._params, self._cache, tokens, positions, mask)
        self._off.update(zip(keys, np.asarray(top).tolist(), strict=False))


def _width(nodes: int) -> int:
    return max(_NARROWEST, 1 << max(nodes - 1, 0).bit_length())


def calls_of(
    drafter: Drafter, request: Hashable, prompt: Sequence[int], response: Sequence[int], width: int, vocab_size: int
) -> Generator[Ask, list[list[int]], int]:
    """The steps that `generate` takes for a request, the drafter told what `generate` tells it.

    Yields:
      what `Answers.topk` is to be asked for, where the drafter wants it; expects the rows.

    Returns:
      the number of steps.
    """
    observer = topk_drafter(drafter)
    drafter.begin(request, prompt)
    done = calls = 0
    newest = prompt[-1]
    while done < len(response):
        depth = len(response) - done - 1
        draft = Draft()
        if depth:
            found = drafter.draft(request, width - 1, depth)
            draft = normalize(found, budget=width - 1, max_depth=depth, vocab_size=vocab_size)
        accepted = walk(draft, response, done)
        if observer is not None:
            rows = yield done, draft, accepted
            observer.observe_topk(request, [newest, *draft.tokens], [row[: observer.wants_topk] for row in rows])
        drafter.verified(request, draft, accepted)
        emitted = list(response[done : done + len(accepted) + 1])
        drafter.extend(request, emitted)
        done += len(emitted)
        newest = emitted[-1]
        calls += 1
    drafter.end(request)
    return calls


def count_calls(
    model: Model,
    params: Params,
    drafters: dict[str, Drafter],
    request: Hashable,
    prompt: Sequence[int],
    response: Sequence[int],
    width: int,
) -> dict[str, int]:
    """The steps that `generate` takes for a request with each of several drafters, side by side."""
    answers = Answers(model, params, prompt, response, nodes=len(drafters) * (width - 1))
    running = {
        name: calls_of(drafter, request, prompt, response, width, model.vocab_size)
        for name, drafter in drafters.items()
    }
    rows: dict[str, Any] = dict.fromkeys(running)
    calls = dict.fromkeys(drafters, 0)
    while rows:
        asks: dict[str, Ask] = {}
        for name, row in rows.items():
            try:
                asks[name] = running[name].send(row)
            except StopIteration as stop:
                calls[name] = stop.value
        rows = dict(zip(asks, answers.topk(list(asks.values())), strict=True))
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
        for name, count in count_calls(
            model, params, drafters, i, request["prompt"], request["response"], width
        ).items():
            calls[name] += count
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
    parser.add_argument("--tasks", help="names, with commas between; all by default")
    parser.add_argument("--width", type=int, default=16, help="%(default)s")
    arguments = parser.parse_args()
    with open(arguments.traces, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    loaded = load(arguments.model, tokenizer=None)
    table = {}
    for task in arguments.tasks.split(",") if arguments.tasks else sorted({row["task"] for row in rows}):
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
