"""A progress bar over the chunks of a run."""

from __future__ import annotations

from collections.abc import Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxlookahead.results import Chunk


def track(chunks: Iterator[Chunk], *, requests: int) -> Iterator[Chunk]:
    """Passes `chunks` on and shows how many of the `requests` have ended, and how many tokens came."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("", total=requests, tokens=0)
        tokens = 0
        for chunk in chunks:
            tokens += len(chunk.tokens)
            bar.update(task, advance=int(chunk.finish_reason is not None), tokens=tokens)
            yield chunk
