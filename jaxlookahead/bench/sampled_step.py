"""Cost of a sampled step beside a greedy one: `python -m jaxlookahead.bench.sampled_step`.

Times the compiled steps that `generate` runs, on random weights of SmolLM2-135M's shape; for other vocabularies only
the embedding grows, which flatters no sampler: the rest of the step stays small. Trees hold a path of `accepted` nodes
that each setting does accept, the other nodes are wrong. All settings take turns within a round, so a busy machine
disturbs them alike. The table shows the median of a round's ratios to the greedy step and, in brackets, the ratio of
the least times.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlookahead import tree
from jaxlookahead.accept import NO_TOKEN, Progress, StopRules
from jaxlookahead.bench.step import random_smollm2
from jaxlookahead.drafters.protocol import Draft
from jaxlookahead.engine import State, compiled, platform_of
from jaxlookahead.mesh import mesh_of
from jaxlookahead.models.protocol import Model, Params
from jaxlookahead.sampling import Sampling, SamplingArrays, pack

SETTINGS: dict[str, Sampling | None] = {
    "greedy": None,
    "temperature": Sampling(temperature=0.7),
    "temperature, top-p": Sampling(temperature=0.7, top_p=0.9),
    "temperature, top-k": Sampling(temperature=0.7, top_k=50),
    "temperature, repetition penalty": Sampling(temperature=0.7, repetition_penalty=1.3),
}


class _Job:
    """One setting's step, again and again from the same state."""

    def __init__(
        self, model: Model, params: Params, sampling: Sampling | None, *, batch: int, width: int, slots: int
    ) -> None:
        self._step = compiled(model, platform_of(params), mesh_of(params)).step
        self._params, self._batch, self._width, self._slots = params, batch, width, slots
        self._cache: Any = model.init_cache(batch, slots)
        self._settings: SamplingArrays | None = None
        if sampling is not None:
            arrays = pack([sampling] * batch, requests=range(batch), vocab_size=model.vocab_size)
            self._settings = jax.device_put(arrays)
        self._wrong = [(7 * i) % model.vocab_size for i in range(1, width)]
        self._packed = self._trees([[] for _ in range(batch)])

    def accept(self, count: int) -> int:
        """Puts a path of up to `count` nodes that will be accepted into the trees; returns the accepted number."""
        paths: list[list[int]] = [[] for _ in range(self._batch)]
        for depth in range(min(count, self._width - 1)):
            self._packed = self._trees(paths)
            out = np.asarray(self._call())
            paths = [[*path, int(row[2 + depth])] for path, row in zip(paths, out, strict=True)]
        self._packed = self._trees(paths)
        return int(np.asarray(self._call())[:, 0].min()) - 1

    def seconds(self) -> float:
        """Time of one step, its result on the host."""
        state = self._state()
        jax.block_until_ready(state)
        start = time.perf_counter()
        np.asarray(self._call(state))
        return time.perf_counter() - start

    def _trees(self, paths: list[list[int]]) -> np.ndarray:
        drafts = []
        for path in paths:
            draft = Draft(tokens=list(path), parents=list(range(-1, len(path) - 1)))
            for token in self._wrong[len(path) :]:
                draft.tokens.append(token)
                draft.parents.append((len(draft.tokens) - 2) // 2 if len(path) < 2 else -1)
            drafts.append(draft)
        return tree.pack([3] * len(paths), drafts, self._width)

    def _state(self) -> State:
        """The state before the step: half of the slots filled. The cache is always the same one."""
        batch, length = self._batch, (self._slots - self._width) // 2
        sampled = self._settings is not None
        return State(
            lengths=jnp.full(batch, length, jnp.int32),
            progress=Progress(
                remaining=jnp.full(batch, 10**6, jnp.int32), tail=jnp.full((batch, 1), NO_TOKEN, jnp.int32)
            ),
            stops=StopRules(
                eos=jnp.full((batch, 1), NO_TOKEN, jnp.int32), sequences=jnp.full((batch, 1, 1), NO_TOKEN, jnp.int32)
            ),
            prompt_lengths=jnp.full(batch, length + 1, jnp.int32) if sampled else None,
            history=jnp.zeros((batch, self._slots + 1), jnp.int32) if sampled else None,
        )

    def _call(self, state: State | None = None) -> jax.Array:
        state = self._state() if state is None else state
        self._cache, _, out = self._step(self._params, self._cache, state, self._packed, self._settings)
        return out


def measure(
    model: Model,
    params: Params,
    *,
    batch: int,
    width: int,
    accepted: int = 2,
    slots: int = 256,
    rounds: int = 15,
) -> tuple[dict[str, np.ndarray], int]:
    """Times one step for every setting.

    Args:
      model: the model.
      params: its parameters.
      batch: `B`.
      width: `N`.
      accepted: draft nodes accepted in each row, at most; the walk visits one node more.
      slots: `S`, half of them committed.
      rounds: how often.

    Returns:
      Milliseconds a step, one entry a round, by setting, and the number of nodes that every setting accepted at least.
    """
    jobs = {
        name: _Job(model, params, sampling, batch=batch, width=width, slots=slots)
        for name, sampling in SETTINGS.items()
    }
    fewest = min(job.accept(accepted) for job in jobs.values())
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            taken[name].append(job.seconds() * 1e3)
    return {name: np.array(times) for name, times in taken.items()}, fewest


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxlookahead.bench.sampled_step", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--width", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print("| V | B | N | accepted | " + " | ".join(SETTINGS) + " |")
    print("|" + "---|" * (4 + len(SETTINGS)))
    for vocab_size in options.vocab:
        model, params = random_smollm2(vocab_size)
        for batch in options.batch:
            for width in options.width:
                times, accepted = measure(model, params, batch=batch, width=width, rounds=options.rounds)
                base = times["greedy"]
                cells = [f"{np.median(base):.1f} ms ({base.min():.1f})"]
                # Ratios of neighbours in time, so that a change of load within the run cancels.
                for name, x in times.items():
                    if name != "greedy":
                        cells.append(f"{np.median(x / base):.2f} ({x.min() / base.min():.2f})")
                print(f"| {vocab_size:,} | {batch} | {width} | {accepted} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
