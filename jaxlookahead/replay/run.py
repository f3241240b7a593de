"""Replays recorded responses against a drafter, without a model."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxlookahead.drafters.protocol import Draft, Drafter
from jaxlookahead.replay.traces import Trace

CALIBRATION_BINS = 10


@dataclasses.dataclass
class TaskResult:
    """What one task's test rows gave.

    Attributes:
      rows: test rows replayed.
      tokens: response tokens after the first one of each row.
      calls: verify steps; the prefill that gives a row's first token is not one.
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
    bins: list[list[float]] = dataclasses.field(default_factory=lambda: [[0, 0.0, 0] for _ in range(CALIBRATION_BINS)])

    @property
    def tokens_per_call(self) -> float:
        return self.tokens / self.calls if self.calls else float("nan")


@dataclasses.dataclass
class ReplayResult:
    """The results of a replay by task, and what the shared memory cost.

    Attributes:
      tasks: results by task name, in order of appearance.
      insert_us_per_token: microseconds a token of putting text into the shared memory, None where none was.
      shared_nodes: nodes of the drafter's shared memory at the end, or None where it has none.
      bytes_per_token: memory of the shared memory per token put in, or None.
    """

    tasks: dict[str, TaskResult]
    insert_us_per_token: float | None = None
    shared_nodes: int | None = None
    bytes_per_token: float | None = None

    @property
    def geometric_mean(self) -> float:
        values = [task.tokens_per_call for task in self.tasks.values() if task.calls]
        return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def walk(draft: Draft, response: Sequence[int], position: int) -> list[int]:
    """The nodes of `draft` that `response[position:]` follows, from a child of the newest token downwards."""
    path: list[int] = []
    node = -1
    children = {(parent, token): i for i, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True))}
    while position < len(response):
        child = children.get((node, response[position]))
        if child is None:
            break
        path.append(child)
        node = child
        position += 1
    return path


def replay_row(drafter: Drafter, row: Trace, result: TaskResult, budget: int, max_depth: int, remember: bool) -> None:
    """Decodes one row as `generate` would: a token from prefill, then draft, verify, extend to the end."""
    response = row.response
    drafter.begin(row.name, row.prompt)
    drafter.extend(row.name, response[:1])
    done = 1
    while done < len(response):
        begun = time.perf_counter()
        draft = drafter.draft(row.name, budget, max_depth)
        result.draft_us.append((time.perf_counter() - begun) * 1e6)
        path = walk(draft, response, done)
        drafter.verified(row.name, draft, path)
        step = min(len(path) + 1, len(response) - done)
        drafter.extend(row.name, response[done : done + step])
        drafter.idle()
        done += step
        result.calls += 1
        result.nodes += len(draft)
        result.accepted += len(path)
        if draft.probs is not None:
            on_path = set(path)
            for i, prob in enumerate(draft.probs):
                cell = result.bins[min(int(prob * CALIBRATION_BINS), CALIBRATION_BINS - 1)]
                cell[0] += 1
                cell[1] += prob
                cell[2] += i in on_path
    drafter.end(row.name, remember=remember)
    result.rows += 1
    result.tokens += len(response) - 1


def replay(
    make_drafter: Callable[[], Drafter],
    traces: Iterable[Trace],
    *,
    budget: int = 32,
    max_depth: int = 64,
    cold: bool = False,
    isolated: bool = False,
) -> ReplayResult:
    """Replays the test rows of `traces` in order, the warm rows' responses known beforehand.

    Args:
      make_drafter: gives a fresh drafter. Where it has `insert(tokens)`, that is how warm responses enter.
      traces: the rows.
      budget: draft nodes a step, the root not counted.
      max_depth: the deepest a draft may go.
      cold: leave the warm rows out; test responses still enter as they end.
      isolated: a fresh drafter for every test row, nothing kept between them.
    """
    rows = list(traces)
    warm = [row for row in rows if row.split == "warm"] if not (cold or isolated) else []
    drafter = make_drafter()
    result = ReplayResult(tasks={})
    insert: Any = getattr(drafter, "insert", None)
    if insert is not None and warm:
        begun = time.perf_counter()
        for row in warm:
            insert(row.response)
        count = sum(len(row.response) for row in warm)
        result.insert_us_per_token = (time.perf_counter() - begun) * 1e6 / count
    for row in rows:
        if row.split != "test":
            continue
        if isolated:
            drafter = make_drafter()
        task = result.tasks.setdefault(row.task, TaskResult())
        replay_row(drafter, row, task, budget, max_depth, remember=not isolated)
    stats: Any = getattr(drafter, "stats", None)
    if callable(stats):
        found = stats()
        result.shared_nodes = found.get("nodes")
        if found.get("tokens"):
            result.bytes_per_token = found["bytes"] / found["tokens"]
    return result
