"""Exact removal of a document from a suffix index, as if it had never been put in.

Exact as long as nothing was evicted. Once nodes have been evicted and met again, their counts are lower than
the text says; removal then takes away too much rather than too little.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxlookahead.drafters.suffix_index import (
    COUNT,
    DEPTH,
    END,
    FIRST,
    GONE,
    LAST,
    PARENT,
    REFS,
    SHIFT,
    TOKEN,
    SuffixIndex,
)


def remove_document(index: SuffixIndex, root: int, start: int, stop: int, ends: Sequence[int] = ()) -> None:
    """Takes the document at positions `[start, stop)`, its closing `END` included, out of the index.

    Args:
      index: the index.
      root: the body of text the document is in.
      start: position of its first token.
      stop: position after its `END`.
      ends: positions of the `END`s of the other documents below the same root, in ascending order.
    """
    nodes = index.nodes
    tokens = [index.token_at(position) for position in range(start, stop)]
    touched: dict[int, None] = {}
    for offset in range(len(tokens)):
        node = root
        for token in tokens[offset : offset + index.depth]:
            if token < 0:
                break
            node = index.find(node, token)
            if not node:
                break
            nodes[(node << SHIFT) + COUNT] -= 1
            touched[node] = None
    parents: dict[int, None] = {}
    for node in sorted(touched, key=lambda n: (-nodes[(n << SHIFT) + DEPTH], n)):
        at = node << SHIFT
        parent = nodes[at + PARENT]
        if nodes[at + DEPTH] > 1:
            parents[parent] = None
        if nodes[at + COUNT] <= 0 and not nodes[at + FIRST] and not nodes[at + REFS]:
            index.detach(node)
            continue
        children = index.children(node)
        # Only after evictions can a node have fewer occurrences than what builds on it.
        followed = sum(nodes[(c << SHIFT) + COUNT] for c in children)
        nodes[at + COUNT] = max(nodes[at + COUNT], followed, 1)
        if nodes[at + COUNT] == 1 and len(children) == 1 and not nodes[(children[0] << SHIFT) + FIRST]:
            child = children[0]
            if not nodes[(child << SHIFT) + REFS]:
                nodes[at + LAST] = max(nodes[(child << SHIFT) + LAST] - 1, GONE)
                parents.pop(node, None)
                index.detach(child)
                continue
        if start <= nodes[at + LAST] < stop:
            if children:
                nodes[at + LAST] = max(max(nodes[(c << SHIFT) + LAST] for c in children) - 1, GONE)
            elif nodes[at + TOKEN] == END:
                nodes[at + LAST] = _earlier_end(index, node, ends)
            elif nodes[at + DEPTH] == index.depth:
                nodes[at + LAST] = _earlier(index, nodes[at + LAST], start, stop)
            else:
                nodes[at + LAST] = GONE
        if children:
            parents[node] = None
    nodes[(root << SHIFT) + COUNT] -= len(tokens)
    for position in range(start, stop):
        if position >= index.position - index.text_capacity:
            index.text[position % index.text_capacity] = GONE
    for node in parents:
        if nodes[(node << SHIFT) + COUNT]:
            index.rerank(node)
    index.version += 1


def remove_root(index: SuffixIndex, root: int) -> None:
    """Takes everything below a root out of the index, and the root itself."""
    found = []
    stack = [root]
    while stack:
        children = index.children(stack.pop())
        found += children
        stack += children
    for node in sorted(found, key=lambda n: (-index.nodes[(n << SHIFT) + DEPTH], n)):
        index.detach(node)
    index.drop_root(root)
    index.version += 1


def _earlier(index: SuffixIndex, position: int, start: int, stop: int) -> int:
    """The occurrence before `position` of the longest context there, outside `[start, stop)`."""
    oldest = index.position - index.text_capacity
    while position >= 0:
        position = index.earlier[position % index.text_capacity] if position >= oldest else GONE
        if position < oldest:
            return GONE
        if not start <= position < stop and index.token_at(position) != GONE:
            return position
    return GONE


def _earlier_end(index: SuffixIndex, node: int, ends: Sequence[int]) -> int:
    """The latest of `ends` before which the context of an `END` node stands."""
    nodes = index.nodes
    context = []
    node = nodes[(node << SHIFT) + PARENT]
    while nodes[(node << SHIFT) + DEPTH]:
        context.append(nodes[(node << SHIFT) + TOKEN])
        node = nodes[(node << SHIFT) + PARENT]
    for end in reversed(ends):
        if all(index.token_at(end - 1 - back) == token for back, token in enumerate(context)):
            return end
    return GONE
