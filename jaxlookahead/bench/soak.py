"""Many requests from several threads on one model: `python -m jaxlookahead.bench.soak`.

Tries are at their cap from the start, some shared between threads and some not. Every response must be that of a plain
run of its own, nothing may compile a second time, and memory must not grow after the warm-up.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlookahead import engine
from jaxlookahead.bench.equality import TIE
from jaxlookahead.decoding import generate
from jaxlookahead.drafters.trie import TrieDrafter
from jaxlookahead.models.protocol import Model, Params
from jaxlookahead.results import Output, first_difference
from jaxlookahead.sampling.params import Sampling
from jaxlookahead.width import buckets

_STATM = Path("/proc/self/statm")


@dataclasses.dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
      request_id: the `r` of its noise.
      prompt: token ids.
      max_new_tokens: of the response.
      namespace: in the drafter's memory.
      sampling: how it chooses its tokens; None in greedy batches.
    """

    request_id: int
    prompt: list[int]
    max_new_tokens: int
    namespace: str | None
    sampling: Sampling | None


@dataclasses.dataclass
class Report:
    """What a soak found.

    Attributes:
      requests: decoded.
      tokens: emitted.
      seconds: all in all.
      different: responses that are not those of plain runs, near-ties left out.
      ties: responses that part from plain runs at a floating-point near-tie.
      twice: compiled calls that were traced more than once.
      late: compiled calls that were first met after the warm-up.
      resident: bytes of resident memory, after each batch since the warm-up.
      nodes: of the fullest trie.
      max_nodes: its cap.
    """

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    different: int = 0
    ties: int = 0
    twice: list[str] = dataclasses.field(default_factory=list)
    late: list[str] = dataclasses.field(default_factory=list)
    resident: list[int] = dataclasses.field(default_factory=list)
    nodes: int = 0
    max_nodes: int = 0

    @property
    def growth(self) -> int:
        """Bytes between the medians of the first and the last quarter of `resident`."""
        quarter = max(len(self.resident) // 4, 1)
        return int(np.median(self.resident[-quarter:]) - np.median(self.resident[:quarter]))


def make_requests(vocab_size: int, count: int, batch: int, max_new_tokens: int) -> Iterator[list[Request]]:
    """Batches of `batch` different requests, two greedy and two sampled ones in turn: `count` requests in all.

    Prompts are short and random, a phrase over and over, or a question about one long text.
    """
    rng = np.random.default_rng(0)
    text = rng.integers(0, vocab_size, 96).tolist()
    samplings = (
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.7, top_p=0.9, seed=2),
        Sampling(temperature=1.0, top_k=8, repetition_penalty=1.2, seed=3),
        Sampling(),
    )
    numbers = iter(range(count))
    while chosen := list(itertools.islice(numbers, batch)):
        greedy = chosen[0] // batch % 4 < 2
        requests = []
        for i in chosen:
            words = rng.integers(0, vocab_size, int(rng.integers(2, 10))).tolist()
            requests.append(
                Request(
                    request_id=i,
                    prompt=(words, words * 4, text + words)[i % 3],
                    max_new_tokens=int(rng.integers(max_new_tokens // 2, max_new_tokens + 1)),
                    namespace=(None, "a", "b")[i % 3],
                    sampling=None if greedy else samplings[i % len(samplings)],
                )
            )
        yield requests


def decode(model: Model, params: Params, requests: Sequence[Request], **options: Any) -> list[Output]:
    """One call of `generate`."""
    samplings = [request.sampling for request in requests if request.sampling is not None]
    result = generate(
        model,
        params,
        [request.prompt for request in requests],
        max_new_tokens=[request.max_new_tokens for request in requests],
        namespaces=[request.namespace for request in requests],
        request_ids=[request.request_id for request in requests],
        sampling=samplings or None,
        **options,
    )
    return list(result)


def soak(
    model: Model,
    params: Params,
    *,
    requests: int = 2000,
    threads: int = 2,
    different: int = 96,
    max_new_tokens: int = 24,
    max_nodes: int = 8192,
    width: int = 8,
    batch: int = 8,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Decodes `requests` requests and compares them with plain runs of their own.

    Args:
      model: the model.
      params: its parameters.
      requests: how many in all, the quarter that warms up included.
      threads: that call `generate` at the same time.
      different: how many different requests there are; they come again and again.
      max_new_tokens: the longest response.
      max_nodes: cap of each trie.
      width: of steps.
      batch: requests of a call, half of which decode together.
      progress: called with a line of text now and then.
    """
    started = time.perf_counter()
    before = collections.Counter(engine.TRACES)
    batches = list(make_requests(model.vocab_size, different, batch, max_new_tokens))
    report = Report(max_nodes=max_nodes)
    progress(f"{different} requests alone, without drafts")
    wanted = [[decode(model, params, [one], drafter=None, rows=1)[0] for one in some] for some in batches]
    shared, *own = (_full_trie(model.vocab_size, max_nodes, seed) for seed in range(1 + threads))
    lock = threading.Lock()

    def run(thread: int, number: int, width: int = width) -> None:
        chosen = batches[number % len(batches)]
        # Every batch comes to both kinds of drafter and of width control.
        turn = number // len(batches)
        outputs = decode(
            model,
            params,
            chosen,
            drafter=shared if turn % 2 else own[thread],
            adapt=turn % 4 < 2,
            width=width,
            rows=max(batch // 2, 1),
        )
        resident = _resident()
        with lock:
            report.requests += len(chosen)
            report.tokens += sum(len(output.tokens) for output in outputs)
            report.resident.append(resident)
            for one, other in zip(wanted[number % len(batches)], outputs, strict=True):
                parting = first_difference(one, other)
                if parting is not None:
                    report.ties += parting.margin <= TIE
                    report.different += parting.margin > TIE

    def run_all(numbers: Sequence[int]) -> None:
        def work(thread: int) -> None:
            for number in numbers[thread::threads]:
                run(thread, number)

        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(work, thread) for thread in range(threads)]:
                done.result()

    total = requests // batch
    progress("warm-up")
    run_all(range(total // 4))
    # Widths that pay on another day.
    for narrower in buckets(width):
        for number in (0, 2):
            run(0, number + 2 * len(batches), narrower)
    warm = set(engine.TRACES)
    report.resident.clear()
    tenth = max(3 * total // 40, 1)
    for first in range(total // 4, total, tenth):
        run_all(range(first, min(first + tenth, total)))
        progress(f"{report.requests} requests, {report.resident[-1] / 2**20:.0f} MiB")
    new = engine.TRACES - before
    report.twice = [str(key[1:]) for key, count in new.items() if count > 1]
    report.late = [str(key[1:]) for key in new if key not in warm]
    report.nodes = max(trie.stats()["nodes"] for trie in (shared, *own))
    report.seconds = time.perf_counter() - started
    return report


def _full_trie(vocab_size: int, max_nodes: int, seed: int) -> TrieDrafter:
    trie = TrieDrafter(max_nodes=max_nodes, vocab_size=vocab_size)
    rng = np.random.default_rng(seed)
    # A token adds at most `depth` nodes, and an insertion at the cap makes room.
    for _ in range(max_nodes // 128):
        trie.insert(rng.integers(0, vocab_size, 256).tolist())
    return trie


def _resident() -> int:
    """Bytes of resident memory; the most there ever were, where the system does not tell."""
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> int:
    """Prints a report. Returns 1 where something is wrong."""
    from jaxlookahead.models.dummy import tiny_decoder

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--max-nodes", type=int, default=8192, help="cap of each trie")
    parser.add_argument("--max-growth", type=float, default=8.0, help="MiB")
    options = parser.parse_args()
    model, params = tiny_decoder()
    report = soak(
        model,
        params,
        requests=options.requests,
        threads=options.threads,
        max_new_tokens=options.max_new_tokens,
        max_nodes=options.max_nodes,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    growth = report.growth / 2**20
    print(
        f"{report.requests} requests, {report.tokens} tokens, {report.seconds:.0f} s; {report.different} differ from "
        f"plain, {report.ties} at a tie; {len(report.twice)} calls traced twice, {len(report.late)} after the warm-up; "
        f"memory {report.resident[0] / 2**20:.0f} MiB, {growth:+.1f}; {report.nodes} of {report.max_nodes} nodes"
    )
    for line in (*report.twice, *report.late):
        print(line, file=sys.stderr)
    return int(bool(report.different or report.twice or report.late) or growth > options.max_growth)


if __name__ == "__main__":
    sys.exit(main())
