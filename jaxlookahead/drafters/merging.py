"""Merging shared memories that were made on several machines."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Sequence

from jaxlookahead.drafters.calibration import Calibration
from jaxlookahead.drafters.memory import Memory


def merge_memories(memories: Sequence[Memory]) -> Memory:
    """One memory with the documents of several, the same whatever their order.

    Documents go in by age, which is the amount of text that came after them in their own memory, oldest
    first; equal ages by content. Documents whose text has been overwritten are not merged. Weights are
    averaged, each memory counting as much as it has seen.

    Args:
      memories: the memories; the first one's depth and cap are used.

    Raises:
      ValueError: they differ in depth, or in what a namespace falls back on.
    """
    first = memories[0]
    rows = []
    for memory in memories:
        index = memory.index
        if index.depth != first.index.depth:
            raise ValueError(f"can't merge memories of depth {first.index.depth} and {index.depth}")
        for document in memory.documents.values():
            tokens = [index.token_at(position) for position in range(document.start, document.stop - 1)]
            names = (repr(document.namespace), repr(document.key))
            rows.append((document.stop - index.position, tokens, names, document))
    rows.sort(key=lambda row: row[:3])
    merged = Memory(first.index.depth, first.index.max_nodes or 0)
    parents: dict[Hashable, Hashable | None] = {}
    for memory in memories:
        for child, parent in memory.parents.items():
            if parents.setdefault(child, parent) != parent:
                raise ValueError(f"namespace {child!r} falls back on {parents[child]!r} and on {parent!r}")
    for child, parent in parents.items():
        merged.set_parent(child, parent)
    for _, tokens, _, document in rows:
        merged.insert(tokens, document.namespace, document.key, contextlib.nullcontext())
    for namespace in sorted({name for memory in memories for name in memory.calibrations}, key=repr):
        found = [memory.calibrations[namespace] for memory in memories if namespace in memory.calibrations]
        merged.calibrations[namespace] = _average(found)
    return merged


def _average(calibrations: list[Calibration]) -> Calibration:
    merged = Calibration()
    for kind in ("copy", "context"):
        weights = [getattr(calibration, kind) for calibration in calibrations]
        seen = [getattr(calibration, kind + "_seen") for calibration in calibrations]
        for i, start in enumerate(getattr(merged, kind)):
            counts = [column[i] for column in seen]
            getattr(merged, kind + "_seen")[i] = sum(counts)
            value = _mean([column[i] for column in weights], counts, start)
            getattr(merged, kind)[i] = value
    for kind in ("estimated", "accepted"):
        columns = zip(*(getattr(calibration, kind) for calibration in calibrations), strict=True)
        setattr(merged, kind, [math.fsum(column) / len(calibrations) for column in columns])
    merged.settle()
    for name in sorted({name for calibration in calibrations for name in calibration.extra}):
        pairs = [calibration.extra[name] for calibration in calibrations if name in calibration.extra]
        counts = [pair[1][0] for pair in pairs]
        merged.extra[name] = ([_mean([pair[0][0] for pair in pairs], counts, 0.3)], [sum(counts)])
    return merged


def _mean(values: list[float], counts: list[int], start: float) -> float:
    # Correctly rounded sums, so that the order doesn't show.
    return math.fsum(v * n for v, n in zip(values, counts, strict=True)) / sum(counts) if sum(counts) else start
