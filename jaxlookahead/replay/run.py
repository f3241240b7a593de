"""Replays recorded responses against a drafter, without a model."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxlookahead.drafters.protocol import Draft, Drafter
from jaxlookahead.replay.traces import Trace

CALIBRATION_BINS = 10
# Share of tokens replaced in text that fills the memory, so that it is repetitive as real traffic is, not
# identical.
VARIATION = 0.05


def _bins() -> list[list[float]]:
    return [[0, 0.0, 0] for _ in range(CALIBRATION_BINS)]


@dataclasses.dataclass
class TaskResult:
    """What one task's test rows gave.

    Attributes:
      rows: test rows replayed.
      tokens: response tokens after the first one of each row, which prefill gives.
      calls: verify steps.
      nodes: draft nodes proposed, the root not counted.
      accepted: draft nodes accepted.
      draft_us: microseconds of every call of `draft`.
      bins: for each tenth of estimated probability `[nodes, sum of estimates, accepted]`.
    """

    rows: int = 0
    tokens: int = 0
    calls: int = 0
    nodes: int = 0
    accepted: int = 0
    draft_us: list[float] = dataclasses.field(default_factory=list)
    bins: list[list[float]] = dataclasses.field(default_factory=_bins)

    @property
    def tokens_per_call(self) -> float:
        """Tokens a verify step gave, 1 without any draft."""
        return self.tokens / self.calls if self.calls else 1.0

    def count(self, draft: Draft, path: Sequence[int]) -> None:
        """Counts one step's draft, of which the nodes of `path` were accepted."""
        self.calls += 1
        self.nodes += len(draft)
        self.accepted += len(path)
        if draft.probs is not None:
            on_path = set(path)
            for node, prob in enumerate(draft.probs):
                cell = self.bins[min(max(int(prob * CALIBRATION_BINS), 0), CALIBRATION_BINS - 1)]
                cell[0] += 1
                cell[1] += prob
                cell[2] += node in on_path


@dataclasses.dataclass
class ReplayResult:
    """The results of a replay by task, and what shared memory cost.

    Attributes:
      tasks: results by task, in order of appearance.
      inserted: tokens put into shared memory.
      insert_us: microseconds that took.
      insert_ms_max: milliseconds of the slowest single document.
      nodes: nodes of shared memory at the end, or None where the drafter has none.
      bytes_per_token: memory of the shared text per token put in, or None.
    """

    tasks: dict[str, TaskResult] = dataclasses.field(default_factory=dict)
    inserted: int = 0
    insert_us: float = 0.0
    insert_ms_max: float = 0.0
    nodes: int | None = None
    bytes_per_token: float | None = None

    @property
    def geometric_mean(self) -> float:
        """Geometric mean over the tasks of tokens per call."""
        values = [task.tokens_per_call for task in self.tasks.values()]
        return math.exp(sum(map(math.log, values)) / len(values)) if values else 1.0

    @property
    def insert_us_per_token(self) -> float | None:
        return self.insert_us / self.inserted if self.inserted else None

    def time_insert(self, tokens: int, call: Callable[[], None]) -> None:
        """Runs and times a call that puts text into shared memory."""
        begun = time.perf_counter()
        call()
        taken = time.perf_counter() - begun
        self.inserted += tokens
        self.insert_us += taken * 1e6
        self.insert_ms_max = max(self.insert_ms_max, taken * 1e3)


def walk(draft: Draft, response: Sequence[int], position: int) -> list[int]:
    """The nodes of `draft` that `response[position:]` follows, from a child of the newest token downwards."""
    edges = zip(draft.parents, draft.tokens, strict=True)
    children = {edge: node for node, edge in enumerate(edges)}
    path: list[int] = []
    node = -1
    while position < len(response):
        child = children.get((node, response[position]))
        if child is None:
            break
        path.append(child)
        node = child
        position += 1
    return path


def varied(rows: Sequence[Trace], tokens: int, seed: int = 0) -> Iterator[list[int]]:
    """Responses and prompts of `rows`, over and over with some tokens replaced, until there are `tokens`."""
    pool = [token for row in rows for token in row.response]
    rng = random.Random(seed)
    while tokens > 0:
        for row in rows:
            for text in (row.response, row.prompt):
                document = [rng.choice(pool) if rng.random() < VARIATION else token for token in text]
                tokens -= len(document)
                yield document
                if tokens <= 0:
                    return


def replay_row(
    drafter: Drafter,
    row: Trace,
    task: TaskResult,
    result: ReplayResult,
    *,
    budget: int,
    max_depth: int,
    remember: bool,
) -> None:
    """Decodes one row as `generate` would: a token from prefill, then draft, verify, extend to the end."""
    response = row.response
    drafter.begin(row.name, row.prompt)
    drafter.extend(row.name, response[:1])
    done = 1
    while done < len(response):
        begun = time.perf_counter()
        draft = drafter.draft(row.name, budget, max_depth)
        task.draft_us.append((time.perf_counter() - begun) * 1e6)
        path = walk(draft, response, done)
        drafter.verified(row.name, draft, path)
        step = min(len(path) + 1, len(response) - done)
        drafter.extend(row.name, response[done : done + step])
        drafter.idle()
        done += step
        task.count(draft, path)
    if remember:
        result.time_insert(len(response), lambda: drafter.end(row.name))
    else:
        drafter.end(row.name, remember=False)
    task.rows += 1
    task.tokens += len(response) - 1


def replay(
    make_drafter: Callable[[], Drafter],
    traces: Iterable[Trace],
    *,
    budget: int = 32,
    max_depth: int = 64,
    cold: bool = False,
    isolated: bool = False,
    fill: int = 0,
) -> ReplayResult:
    """Replays the test rows of `traces` in order, the warm rows' responses known beforehand.

    Args:
      make_drafter: gives a fresh drafter. Where it has `insert(tokens)`, that is how warm responses enter.
      traces: the rows.
      budget: draft nodes a step, the root not counted.
      max_depth: the deepest a draft may go.
      cold: leave the warm rows out; test responses still enter as they end.
      isolated: a fresh drafter for every test row, nothing kept between them.
      fill: first put this many tokens of varied warm text into shared memory, to measure cost at size.
    """
    rows = list(traces)
    warm = [row for row in rows if row.split == "warm"] if not (cold or isolated) else []
    drafter = make_drafter()
    result = ReplayResult()
    insert: Any = getattr(drafter, "insert", None)
    if insert is not None:
        for document in varied(warm, fill if warm else 0):
            result.time_insert(len(document), functools.partial(insert, document))
        for row in warm:
            result.time_insert(len(row.response), functools.partial(insert, row.response))
    for row in rows:
        if row.split == "test":
            if isolated:
                drafter = make_drafter()
            task = result.tasks.setdefault(row.task, TaskResult())
            remember = not isolated
            replay_row(drafter, row, task, result, budget=budget, max_depth=max_depth, remember=remember)
    stats: Any = getattr(drafter, "stats", None)
    if callable(stats):
        found = stats()
        result.nodes = found.get("nodes")
        if found.get("tokens"):
            result.bytes_per_token = found["bytes"] / found["tokens"]
    return result
