"""End-to-end decoding speed: plain against lookahead on the same prompts, taking turns."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlookahead.bench.peers import Peer, Response
from jaxlookahead.decoding import generate
from jaxlookahead.drafters.protocol import Drafter
from jaxlookahead.drafters.registry import make_drafter
from jaxlookahead.results import Difference, Output, first_difference
from jaxlookahead.sampling.params import Sampling

MEMORIES = ("cold", "self", "warm")


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to decode.

    Attributes:
      name: of the prompt.
      task: tasks are reported apart.
      prompt: token ids.
      max_new_tokens: the most tokens to decode.
    """

    name: str
    task: str
    prompt: list[int]
    max_new_tokens: int


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
      name: in the tables.
      drafter: name of a drafter, or None for plain decoding.
      memory: what the drafter remembers: `cold` nothing but the request's own text, `self` the responses before it
        in the task, `warm` recorded responses too.
      peer: decodes instead of this library.
    """

    name: str
    drafter: str | None = None
    memory: str = "cold"
    peer: Peer | None = None


@dataclasses.dataclass
class Run:
    """What decoding a batch of requests took.

    Attributes:
      tokens: emitted.
      calls: model calls after prefill; 0 where a peer does not tell.
      row_calls: the same, counted for each request that took part.
      drafted: draft nodes verified.
      seconds: wall time of `generate`.
      prefill: seconds in prefill.
      draft: seconds in drafting.
      step: seconds in steps.
      wait: of them, seconds in which the host waited for the device.
      peak: the most memory that the process held meanwhile, in bytes.
      different: responses that differ from the first method's.
      unexplained: those of them whose margin at the first difference is over 1e-4.
    """

    tokens: int = 0
    calls: int = 0
    row_calls: int = 0
    drafted: int = 0
    seconds: float = 0.0
    prefill: float = 0.0
    draft: float = 0.0
    step: float = 0.0
    wait: float = 0.0
    peak: int = 0
    different: int = 0
    unexplained: int = 0


def measure(
    loaded: Any,
    requests: Sequence[Request],
    methods: Sequence[Method],
    *,
    warm: Mapping[str, Sequence[Sequence[int]]] | None = None,
    rows: int = 1,
    repeats: int = 1,
    width: int | None = None,
    adapt: bool = True,
    sampling: Sampling | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, list[Run]]]:
    """Decodes all requests with every method.

    Batches of `rows` requests of a task go through the methods in turn, so a busy machine disturbs all alike. The
    whole is done once before, unmeasured, for a batch of every task, which compiles the most of it.

    Args:
      loaded: from `load`.
      requests: what to decode.
      methods: the first one is the yardstick.
      warm: recorded responses of each task, for methods with memory `warm`.
      rows: requests decoded together.
      repeats: how often.
      width: see `generate`.
      adapt: see `generate`.
      sampling: see `generate`.
      progress: called with a line of text now and then.

    Returns:
      For each task and method the runs, one for each batch and repetition, in the same order for every method.
    """
    tasks = sorted({request.task for request in requests})
    runs: dict[str, dict[str, list[Run]]] = {task: {method.name: [] for method in methods} for task in tasks}

    def drafter_for(method: Method, task: str) -> Drafter | None:
        drafter = make_drafter(method.drafter)
        if method.memory == "warm" and drafter is not None:
            insert = getattr(drafter, "insert", None)
            if insert is None:
                raise ValueError(f"drafter {method.drafter!r} has no memory to warm")
            for response in (warm or {}).get(task, ()):
                insert(response)
        return drafter

    def decode(batch: Sequence[Request], drafter: Drafter | None) -> tuple[Run, Any]:
        start = time.perf_counter()
        result = generate(
            loaded.model,
            loaded.params,
            [request.prompt for request in batch],
            max_new_tokens=[request.max_new_tokens for request in batch],
            eos_ids=loaded.eos_ids,
            drafter=drafter,
            width=width,
            adapt=adapt,
            sampling=sampling,
            rows=rows,
        )
        seconds = time.perf_counter() - start
        stats = result.stats
        run = Run(stats.tokens, stats.steps, stats.row_steps, stats.drafted, seconds)
        run.prefill, run.draft, run.step = stats.prefill_seconds, stats.draft_seconds, stats.step_seconds
        run.wait = stats.wait_seconds
        return run, result

    def decode_by_peer(batch: Sequence[Request], peer: Peer) -> tuple[Run, list[Response]]:
        start = time.perf_counter()
        responses = [peer(request.prompt, request.max_new_tokens) for request in batch]
        return Run(sum(response.size for response in responses), seconds=time.perf_counter() - start), responses

    for measured in range(-1, repeats):
        for task in tasks:
            mine = [request for request in requests if request.task == task]
            drafters = {method.name: drafter_for(method, task) for method in methods}
            for i, batch in enumerate(_batches(mine, rows)):
                results: list[Any] = []
                for method in methods:
                    drafter = drafters[method.name]
                    if method.memory == "cold":
                        drafter = make_drafter(method.drafter)
                    _forget_peak_memory()
                    if method.peer is not None:
                        run, result = decode_by_peer(batch, method.peer)
                    else:
                        run, result = decode(batch, drafter)
                    run.peak = peak_memory()
                    results.append(result)
                    for a, b in zip(results[0], result, strict=True):
                        difference = _difference(a, b)
                        run.different += difference is not None
                        run.unexplained += difference is not None and difference.margin > 1e-4
                    if measured >= 0:
                        runs[task][method.name].append(run)
                if measured < 0:
                    # Long prompts meet sizes of cache that short ones do not.
                    if i >= 2:
                        break
                else:
                    progress(f"{task}: {i * rows + len(batch)} of {len(mine)}, repetition {measured + 1}")
    return runs


def _difference(a: Output, b: Output | Response) -> Difference | None:
    """Where a response of the first method and one of another part."""
    if isinstance(b, Response):
        if b.tokens is None:
            return None
        b = dataclasses.replace(a, tokens=np.array(b.tokens, np.int32))
    return first_difference(a, b)


def _batches(requests: Sequence[Request], size: int) -> Iterator[Sequence[Request]]:
    for start in range(0, len(requests), size):
        yield requests[start : start + size]


def summarize(runs: dict[str, dict[str, list[Run]]], yardstick: str, seed: int = 0) -> list[dict[str, Any]]:
    """One row for each task and method, and the geometric mean of the tasks' speed-ups at the end.

    `speedup` is total tokens over total time against the yardstick's; `low` and `high` bound its central 95 % when
    batches are drawn again with replacement (paired bootstrap, 1,000 draws).
    """
    table = []
    for task, methods in runs.items():
        base = methods[yardstick]
        for name, mine in methods.items():
            total = {key: sum(getattr(run, key) for run in mine) for key in dataclasses.asdict(mine[0])}
            low, high = _bootstrap(mine, base, seed)
            seconds, told = total["seconds"], total["calls"] > 0
            row = {
                "task": task,
                "method": name,
                "tokens": total["tokens"],
                "tokens_per_s": total["tokens"] / seconds,
                "speedup": total["tokens"] / seconds / _rate(base),
                "low": low,
                "high": high,
                "peak_memory_bytes": max(run.peak for run in mine),
                "different": total["different"],
                "unexplained": total["unexplained"],
            }
            if told:
                row |= {
                    "tokens_per_call": total["tokens"] / total["row_calls"],
                    "nodes_per_call": total["drafted"] / total["row_calls"],
                    "prefill_share": total["prefill"] / seconds,
                    "draft_share": total["draft"] / seconds,
                    "step_share": total["step"] / seconds,
                    "wait_share": total["wait"] / seconds,
                    "other_share": 1 - (total["prefill"] + total["draft"] + total["step"]) / seconds,
                    "host_ms_per_call": 1e3 * (seconds - total["prefill"] - total["wait"]) / total["calls"],
                }
            table.append(row)
    for name in next(iter(runs.values())):
        speedups = [row["speedup"] for row in table if row["method"] == name]
        table.append({"task": "geometric mean", "method": name, "speedup": float(np.exp(np.mean(np.log(speedups))))})
    return table


def _rate(runs: Sequence[Run]) -> float:
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def _bootstrap(mine: Sequence[Run], base: Sequence[Run], seed: int) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    values = np.array([[a.tokens, a.seconds, b.tokens, b.seconds] for a, b in zip(mine, base, strict=True)])
    drawn = values[rng.integers(0, len(values), (1000, len(values)))].sum(axis=1)
    ratios = drawn[:, 0] / drawn[:, 1] / (drawn[:, 2] / drawn[:, 3])
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def _forget_peak_memory() -> None:
    """Lets `peak_memory` start anew, where the system can: on Linux."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """The most memory that this process held, in bytes: on Linux since it was last made to forget, else ever."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
