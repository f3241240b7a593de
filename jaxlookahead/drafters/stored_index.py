"""Checking and completing the arrays of a suffix index that came from a file."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxlookahead.drafters.suffix_index import (
    COUNT,
    DEPTH,
    END,
    FACTOR,
    FIRST,
    GONE,
    LAST,
    LINK,
    MAX_TOKEN,
    NEXT,
    PARENT,
    PREV,
    RANKED,
    REFS,
    STRIDE,
    TOKEN,
    TOP,
)


class TrieFileError(ValueError):
    """A file can't be loaded; nothing was changed."""


def require(condition: Any, problem: str) -> None:
    """Refuses a file for a problem, unless a condition holds."""
    if not condition:
        raise TrieFileError(problem)


def check_arrays(
    text: np.ndarray,
    earlier: np.ndarray,
    columns: list[np.ndarray],
    roots: int,
    depth: int,
    vocab_size: int | None,
) -> None:
    """Checks that the arrays are those of a suffix index."""
    token, parent, count, last, link, rank = (column.astype(np.int64) for column in columns)
    size = len(token)
    same = all(len(column) == size for column in columns) and len(text) == len(earlier)
    require(
        same and size >= roots and all(c.dtype == "<i4" for c in (text, earlier, *columns)),
        "has wrong arrays",
    )
    limit = MAX_TOKEN if vocab_size is None else vocab_size
    require((((text >= GONE) & (text < limit)) | (text == END)).all(), f"holds token ids outside [0, {limit})")
    require(((earlier >= -1) & (earlier < np.arange(len(text)))).all(), "has positions out of range")
    require((count[:roots] >= 0).all(), "has counts out of range")
    token, up, seen, at, suffix = (column[roots:] for column in (token, parent, count, last, link))
    require((((token >= 0) & (token < limit)) | (token == END)).all(), f"holds token ids outside [0, {limit})")
    own = np.arange(roots, size)
    require(((up >= 0) & (up < own)).all(), "has parents out of order")
    require(((suffix >= 0) & (suffix < own)).all(), "has links out of order")
    require((seen >= 1).all() and ((at >= -1) & (at < len(text))).all(), "has counts or positions out of range")
    followed = np.bincount(up, seen, size)
    require((followed[roots:] <= seen).all(), "has contexts that occur less often than what follows them")
    level = np.zeros(size, np.int64)
    for _ in range(depth + 1):
        level[roots:] = level[up] + 1
    require((level <= depth).all(), "has contexts that are too long")
    # A node without its first token: one level up, the same last token, below the suffix of its parent.
    deep = level[roots:] > 1
    require((suffix[~deep] == up[~deep]).all(), "has wrong links")
    below = suffix[deep]
    require((level[below] == level[roots:][deep] - 1).all(), "has wrong links")
    all_token = np.concatenate([np.full(roots, -1), token])
    require((all_token[below] == token[deep]).all() and (link[up[deep]] == parent[below]).all(), "has wrong links")
    require(len(np.unique(up * FACTOR + token)) == len(up), "holds a context twice")
    ranked = rank[roots:] >= 0
    fit = (rank < RANKED).all() and (rank[:roots] == -1).all() and deep[ranked].all() and (token[ranked] != END).all()
    places = np.sort(up[ranked] * RANKED + rank[roots:][ranked])
    # Distinct, and none without the one before it.
    whole = np.isin(places[places % RANKED > 0] - 1, places).all() and len(np.unique(places)) == len(places)
    require(fit and whole and (rank >= -1).all(), "has wrong ranks")


def edge_keys(columns: list[np.ndarray]) -> np.ndarray:
    return (columns[1].astype(np.int64) + 1) * FACTOR + columns[0].astype(np.int64)


def complete_records(columns: list[np.ndarray], roots: int) -> np.ndarray:
    """Node records, with everything that can be computed; node 0 stays unused, so numbers rise by one."""
    token, parent, count, last, link, rank = (column.astype(np.int64) for column in columns)
    size = len(token)
    records = np.zeros((size + 1, STRIDE), np.int32)
    level = np.zeros(size, np.int64)
    own = np.arange(size)
    up = parent[roots:]
    for _ in range(32):
        level[roots:] = level[up] + 1
    records[1 : roots + 1, COUNT] = count[:roots]
    below = records[roots + 1 :]
    below[:, TOKEN] = token[roots:]
    below[:, PARENT] = up + 1
    below[:, COUNT] = count[roots:]
    below[:, LAST] = last[roots:]
    below[:, LINK] = link[roots:] + 1
    below[:, DEPTH] = level[roots:]
    records[1:, REFS] = np.bincount(link[roots:], minlength=size)
    if size > roots:
        order = np.lexsort((own[roots:], up))
        family = up[order]
        node = own[roots:][order] + 1
        first = np.r_[True, family[1:] != family[:-1]]
        records[family[first] + 1, FIRST] = node[first]
        records[node[:-1][~first[1:]], NEXT] = node[1:][~first[1:]]
        records[node[1:][~first[1:]], PREV] = node[:-1][~first[1:]]
        ranked = np.flatnonzero(rank >= 0)
        records[parent[ranked] + 1, TOP + rank[ranked]] = ranked + 1
    return records
