"""What the host does between steps, and for how long the device waits: `python -m jaxlookahead.bench.host PROMPTS`.

Decodes real prompts and notes, for each step, when the draft began and ended, when the step's dispatch began and
returned, when its results were there, and when the host had them. From these come

- the gap: from one step's results to the return of the next step's dispatch. The device has nothing to do meanwhile;
- of the gap, the draft, the dispatch, and the rest;
- the host's work beside it: what it does while the device runs.

The prompts are those of `jaxlookahead bench`; responses of the split `warm` go into the trie first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxlookahead.decoding import generate
from jaxlookahead.drafters.trie import TrieDrafter
from jaxlookahead.engine import Engine


@dataclasses.dataclass
class Step:
    """Moments of a step, seconds on the clock of `time.perf_counter`."""

    draft_begin: float = 0.0
    draft_end: float = 0.0
    dispatch_begin: float = 0.0
    dispatch_end: float = 0.0
    ready: float = 0.0
    collect_begin: float = 0.0
    collect_end: float = 0.0


@dataclasses.dataclass(frozen=True)
class HostTimes:
    """Milliseconds, one entry for each step but the first.

    Attributes:
      gap: from the results of the step before to the return of this one's dispatch.
      draft: of the gap, time in which drafts were made.
      dispatch: of the gap, from the call of the compiled step to its return.
      rest: of the gap, everything else.
      beside: host work while the device runs: from the return of the dispatch to the begin of the wait.
      host: all but the wait.
      processor: time of the host's thread on a processor, in all of the step but the wait.
    """

    gap: np.ndarray
    draft: np.ndarray
    dispatch: np.ndarray
    rest: np.ndarray
    beside: np.ndarray
    host: np.ndarray
    processor: np.ndarray


class Recorder:
    """Notes moments of steps while its context is open."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.processor: list[float] = []
        self._next = Step()
        self._watchers: list[threading.Thread] = []
        self._processor_begin = 0.0

    def drafter(self, drafter: Any) -> Any:
        """A drafter that drafts as `drafter` does."""
        return _Watched(drafter, self)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches every engine."""
        dispatch, collect = Engine.dispatch, Engine.collect

        def timed_dispatch(engine: Engine, *arguments: Any) -> Any:
            step, self._next = self._next, Step()
            step.dispatch_begin = time.perf_counter()
            out = dispatch(engine, *arguments)
            step.dispatch_end = time.perf_counter()
            self.steps.append(step)

            def wait() -> None:
                out.block_until_ready()
                step.ready = time.perf_counter()

            self._watchers.append(threading.Thread(target=wait))
            self._watchers[-1].start()
            return out

        def timed_collect(engine: Engine, out: Any, **options: Any) -> Any:
            step = self.steps[-1]
            self.processor.append(time.thread_time() - self._processor_begin)
            step.collect_begin = time.perf_counter()
            result = collect(engine, out, **options)
            step.collect_end = time.perf_counter()
            self._processor_begin = time.thread_time()
            return result

        Engine.dispatch, Engine.collect = timed_dispatch, timed_collect  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Engine.dispatch, Engine.collect = dispatch, collect  # type: ignore[method-assign]
            for watcher in self._watchers:
                watcher.join()

    def drafted(self, begin: float, end: float) -> None:
        """Notes a draft for the next step."""
        self._next.draft_begin = self._next.draft_begin or begin
        self._next.draft_end = end

    def times(self) -> HostTimes:
        """What the notes say."""
        columns: dict[str, list[float]] = {field.name: [] for field in dataclasses.fields(HostTimes)}
        for before, step, processor in zip(self.steps, self.steps[1:], self.processor[1:], strict=False):
            # The watcher may hear of the results later than the host, which had them then.
            ready = min(before.ready, before.collect_end)
            gap, draft = step.dispatch_end - ready, step.draft_end - step.draft_begin
            dispatch = step.dispatch_end - step.dispatch_begin
            beside = step.collect_begin - step.dispatch_end
            host = step.collect_begin - before.collect_end
            values = (gap, draft, dispatch, gap - draft - dispatch, beside, host, processor)
            for name, value in zip(columns, values, strict=True):
                columns[name].append(value * 1e3)
        return HostTimes(**{name: np.array(values) for name, values in columns.items()})


class _Watched:
    """A drafter whose drafts are timed."""

    def __init__(self, drafter: Any, recorder: Recorder) -> None:
        self._drafter, self._recorder = drafter, recorder

    def draft(self, *arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        draft = self._drafter.draft(*arguments, **options)
        self._recorder.drafted(begin, time.perf_counter())
        return draft

    # These two are looked for on the class.
    def begin(self, *arguments: Any, **options: Any) -> None:
        self._drafter.begin(*arguments, **options)

    def extend(self, *arguments: Any, **options: Any) -> None:
        self._drafter.extend(*arguments, **options)

    def end(self, *arguments: Any, **options: Any) -> None:
        self._drafter.end(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


def measure(
    loaded: Any,
    prompts: Sequence[Sequence[int]],
    *,
    rows: int,
    width: int = 33,
    max_new_tokens: int = 64,
    warm: Sequence[Sequence[int]] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[HostTimes, list[Step]]:
    """Decodes twice, the first time to compile, and times the second.

    Args:
      loaded: from `load`.
      prompts: what to decode; of one length or `rows` many, so that no row is filled anew.
      rows: `B`.
      width: nodes of a tree, the root counted; all are verified, whatever it costs.
      max_new_tokens: of each prompt.
      warm: responses that the trie holds beforehand.
      progress: called with a line of text now and then.
    """
    options: dict[str, Any] = {"rows": rows, "width": width, "adapt": False, "max_new_tokens": max_new_tokens}
    recorder = Recorder()
    for measured in (False, True):
        recorder = Recorder()
        drafter = TrieDrafter()
        for response in warm:
            drafter.insert(response)
        progress(f"{rows} rows, {'measured' if measured else 'first'} run")
        with recorder.watching():
            generate(loaded.model, loaded.params, prompts, drafter=recorder.drafter(drafter), **options)
    return recorder.times(), recorder.steps


def show(rows: int, times: HostTimes, steps: Sequence[Step], timeline: int) -> None:
    """Prints quantiles, and the moments of some steps."""
    from rich.console import Console
    from rich.table import Table

    table = Table("ms a step", "10 %", "median", "90 %", title=f"{rows} row{'s' * (rows > 1)}, {len(times.gap)} steps")
    for field in dataclasses.fields(times):
        values = getattr(times, field.name)
        table.add_row(field.name, *(f"{np.quantile(values, q):.3f}" for q in (0.1, 0.5, 0.9)))
    Console().print(table)
    if timeline and len(steps) > timeline + 1:
        names = [field.name for field in dataclasses.fields(Step)]
        table = Table("step", *names, title="ms after the results of the step before")
        middle = len(steps) // 2
        for i in range(middle, min(middle + timeline, len(steps))):
            since = min(steps[i - 1].ready, steps[i - 1].collect_end)
            table.add_row(str(i), *(f"{1e3 * (getattr(steps[i], name) - since):.3f}" for name in names))
        Console(width=120).print(table)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m jaxlookahead.bench.host", description=__doc__.splitlines()[0])
    parser.add_argument("traces", help="JSONL with `prompt` and `response`, token ids, and `split`, warm or test")
    parser.add_argument("--rows", default="1,8", help="numbers of rows (%(default)s)")
    parser.add_argument("--width", type=int, default=33, help="nodes of a tree, the root counted (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="%(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=200, help="leave out longer prompts (%(default)s)")
    parser.add_argument("--timeline", type=int, default=5, metavar="N", help="show the moments of N steps")
    options = parser.parse_args()

    from jaxlookahead.checkpoints.load import load

    with open(options.traces, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    warm = [line["response"] for line in lines if line.get("split") == "warm"]
    test = [line["prompt"] for line in lines if line.get("split") != "warm"]
    fitting = [prompt for prompt in test if len(prompt) <= options.prompt_tokens]
    loaded = load(tokenizer=None)
    for rows in map(int, options.rows.split(",")):
        if len(fitting) < rows:
            raise SystemExit(f"{options.traces} holds {len(fitting)} fitting prompts, fewer than {rows} rows")
        prompts = fitting[:: max(len(fitting) // rows, 1)][:rows]
        show(
            rows,
            *measure(loaded, prompts, rows=rows, width=options.width, max_new_tokens=options.max_new_tokens, warm=warm),
            options.timeline,
        )


if __name__ == "__main__":
    main()
