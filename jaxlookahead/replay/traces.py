"""Recorded token traces: reading and checking them."""

from __future__ import annotations

import dataclasses
import json
import os


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """One recorded request.

    Attributes:
      name: what the row is called.
      task: the group it is reported under.
      split: `warm` or `test`.
      prompt: token ids, chat template applied.
      response: token ids that the model gave, EOS included where it ended so.
    """

    name: str
    task: str
    split: str
    prompt: list[int]
    response: list[int]


class TraceError(ValueError):
    """A traces file can't be used; the message says which line and why."""


def read_traces(path: str | os.PathLike[str]) -> list[Trace]:
    """Reads a JSON-lines file of traces.

    Raises:
      TraceError: the file can't be read, or a line isn't a trace.
    """
    traces: list[Trace] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    traces.append(_parse(line, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read traces from {path}: {error}") from None
    if not traces:
        raise TraceError(f"{path} holds no traces")
    return traces


def _parse(line: str, where: str) -> Trace:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise TraceError(f"{where}: expected an object with name, task, split, prompt and response")
    for field in ("task", "prompt", "response"):
        if field not in row:
            raise TraceError(
                f"{where}: the field {field!r} is missing; a line needs task, and prompt and response as token ids"
            )
    split = row.get("split", "test")
    if split not in ("warm", "test"):
        raise TraceError(f"{where}: split={split!r} must be 'warm' or 'test'")
    for field in ("prompt", "response"):
        ids = row[field]
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise TraceError(f"{where}: {field} must be a list of token ids (integers from 0 to 2**31 - 1)")
        if not ids:
            raise TraceError(f"{where}: {field} is empty")
    return Trace(str(row.get("name", where)), str(row["task"]), split, row["prompt"], row["response"])
