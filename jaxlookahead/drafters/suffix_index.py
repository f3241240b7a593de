"""Counts of every context of up to `depth` tokens, in flat arrays: the memory behind the trie drafter.

A node is a context: the string of tokens from the root down to it. It counts the occurrences of that string,
links to the node of the string without its first token, and ranks the few likeliest next tokens. A string
that has occurred once has no children: its only continuation is read from the text itself. So a token of new
text costs about one and a half nodes, and following a link or a ranked child costs one array access, no
hashing.

Everything lives in one `array` of 64-byte records and in dictionaries of plain integers, which the garbage
collector does not walk; many small dictionaries instead of one keep the pause for growing one short.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

# Fields of a record. A record is one cache line.
SHIFT = 4
STRIDE = 1 << SHIFT
TOKEN, PARENT, COUNT, LAST, LINK, FIRST, NEXT, PREV, DEPTH, REFS, TOP = range(11)
RANKED = STRIDE - TOP

FACTOR = 1_048_583  # a prime above every token id: `node * FACTOR + token` is unique and its low bits are mixed
MAX_TOKEN = 1_048_000
END = 1_048_576  # closes every document; never drafted
GONE = -1  # stands in the text where a document was removed
MAX_POSITION = 2**31 - 2**20
NEVER = 1 << 62


class SuffixIndex:
    """Suffix counts over one or several separate bodies of text ("roots").

    Attributes:
      depth: length of the longest context held.
      text: token ids, a ring of `text_capacity` once full; position `p` is at `p % text_capacity`.
      position: absolute position of the next token.
      nodes: the records.
      version: changes whenever anything in the index does.
      back: position of the occurrence before of the longest context that the newest token ended, or -1.
      shifted: what has been taken off positions so far, to keep them within 32 bits.
    """

    def __init__(self, depth: int, *, max_nodes: int | None = None, shards: int = 1) -> None:
        """
        Args:
          depth: length of the longest context held, 2 to 32.
          max_nodes: hard cap on nodes; `None` for a short-lived index that only grows.
          shards: number of dictionaries the edges are spread over.
        """
        if not 2 <= depth <= 32:
            raise ValueError(f"depth={depth} must be from 2 to 32")
        if max_nodes is not None and max_nodes < 8 * (depth + 1):
            raise ValueError(f"max_nodes={max_nodes} must be at least 8 * (depth + 1) = {8 * (depth + 1)}")
        self.depth = depth
        self.max_nodes = max_nodes
        self.text_capacity = NEVER if max_nodes is None else max_nodes
        self.text = array("i")
        self.earlier = array("i")
        self.position = 0
        self.nodes = array("i", [0] * STRIDE)
        self.shards = shards
        self.edges: list[dict[int, int]] = [{} for _ in range(shards)]
        self.free = array("i")
        self.used = 0
        self.version = 0
        self.back = -1
        self.shifted = 0
        # Eviction: no node seen within the newest `window` positions goes, and of the others those whose age
        # is more than `patience` times their count.
        self.window = 0 if max_nodes is None else max(max_nodes // (2 * (depth + 1)), 1)
        self.patience = float(self.window)
        self.hand = 1

    def new_root(self) -> int:
        """Opens a separate body of text and returns its node."""
        if self.max_nodes is not None and self.used >= self.max_nodes:
            self.make_room(len(self.nodes) >> SHIFT)
        return self._allocate((0,) * STRIDE)

    def drop_root(self, root: int) -> None:
        """Gives up a root without children."""
        if self.nodes[(root << SHIFT) + FIRST]:
            raise ValueError("the root still has children")
        self._release(root)

    def find(self, node: int, token: int) -> int:
        """The child of `node` for `token`, or 0."""
        key = node * FACTOR + token
        return self.edges[key % self.shards].get(key, 0)

    def children(self, node: int) -> list[int]:
        """All children of a node, newest first."""
        nodes = self.nodes
        found = []
        child = nodes[(node << SHIFT) + FIRST]
        while child:
            found.append(child)
            child = nodes[(child << SHIFT) + NEXT]
        return found

    def push(self, root: int, live: Sequence[int], token: int) -> list[int]:
        """Appends `token` to the text and counts it in every context.

        Args:
          root: the body of text.
          live: what the push of the token before returned, empty at the start of a document.
          token: the token id.

        Returns:
          The nodes of the contexts that end in `token`, shortest first.
        """
        nodes = self.nodes
        edges = self.edges
        shards = self.shards
        depth = self.depth
        position = self._append(token)
        nodes[(root << SHIFT) + COUNT] += 1
        link = root
        fresh: list[int] = []
        back = -1
        capacity = NEVER if self.max_nodes is None else self.max_nodes
        for level, x in enumerate((root, *live), 1):
            base = x << SHIFT
            # A context seen once has its continuation in the text; so have all longer ones.
            if level > depth or (level > 1 and nodes[base + COUNT] == 1):
                break
            key = x * FACTOR + token
            shard = edges[key % shards]
            child = shard.get(key)
            if child is None:
                if self.free or self.used >= capacity:
                    child = self._add(shard, key, x, token, position, link, level)
                    if not child:
                        break
                else:
                    # As `_add`, inline: this is where the time goes.
                    child = len(nodes) >> SHIFT
                    first = nodes[base + FIRST]
                    nodes.extend((token, x, 1, position, link, 0, first, 0, level, 0, 0, 0, 0, 0, 0, 0))
                    if first:
                        nodes[(first << SHIFT) + PREV] = child
                    nodes[base + FIRST] = child
                    nodes[(link << SHIFT) + REFS] += 1
                    shard[key] = child
                    self.used += 1
                if level > 1 and token != END:
                    if nodes[base + TOP]:
                        self._rank(base, child, 1, position)
                    else:
                        nodes[base + TOP] = child
            else:
                at = child << SHIFT
                count = nodes[at + COUNT] + 1
                back = nodes[at + LAST]
                nodes[at + COUNT] = count
                nodes[at + LAST] = position
                if level > 1 and nodes[base + TOP] != child and token != END:
                    self._rank(base, child, count, position)
                if count == 2 and level < depth and token != END and back + 1 < position:
                    self._split(child, back + 1, link, level + 1)
                if level == depth:
                    self.earlier[position % self.text_capacity] = back
            fresh.append(child)
            link = child
        self.back = back
        self.version += 1
        return fresh

    def close(self, root: int, live: Sequence[int]) -> None:
        """Ends a document, so that nothing is read across its end."""
        self.push(root, live, END)

    def add(self, root: int, tokens: Iterable[int]) -> None:
        """Puts one whole document in."""
        live: list[int] = []
        for token in tokens:
            live = self.push(root, live, token)
        self.close(root, live)

    def token_at(self, position: int) -> int:
        """The token at a position, `GONE` or `END` where none can be read."""
        if 0 <= position < self.position and position >= self.position - self.text_capacity:
            return self.text[position % self.text_capacity]
        return GONE

    def contexts(self, root: int) -> dict[tuple[int, ...], int]:
        """Every string held below a root and its count (for tests and inspection)."""
        found: dict[tuple[int, ...], int] = {}
        stack: list[tuple[int, tuple[int, ...]]] = [(root, ())]
        while stack:
            node, path = stack.pop()
            for child in self.children(node):
                at = child << SHIFT
                string = (*path, self.nodes[at + TOKEN])
                found[string] = self.nodes[at + COUNT]
                stack.append((child, string))
        return found

    def _append(self, token: int) -> int:
        position = self.position
        if position >= MAX_POSITION:
            self._rebase()
            position = self.position
        slot = position % self.text_capacity
        if slot == len(self.text):
            self.text.append(token)
            self.earlier.append(-1)
        else:
            self.text[slot] = token
            self.earlier[slot] = -1
        self.position = position + 1
        return position

    def _rebase(self) -> None:
        """Renumbers positions, which are 32-bit, so that they can go on counting."""
        shift = (self.position - self.text_capacity) // self.text_capacity * self.text_capacity
        for held, start, step in ((self.nodes, LAST, STRIDE), (self.earlier, 0, 1)):
            positions = np.frombuffer(held, np.int32)[start::step]
            np.maximum(positions - shift, -1, out=positions)
        self.shifted += shift
        self.position -= shift
        self.version += 1

    def _split(self, node: int, follower_position: int, link: int, level: int) -> None:
        """Gives a node that is met for the second time a child for what followed it the first time."""
        token = self.token_at(follower_position)
        if token == GONE:
            return
        target = self.find(link, token)
        if not target:
            return
        key = node * FACTOR + token
        child = self._add(self.edges[key % self.shards], key, node, token, follower_position, target, level)
        if child and token != END:
            self._rank(node << SHIFT, child, 1, follower_position)

    def _add(self, shard: dict[int, int], key: int, parent: int, token: int, last: int, link: int, level: int) -> int:
        # Counted first, so that making room leaves the link's target alone.
        self.nodes[(link << SHIFT) + REFS] += 1
        if self.max_nodes is not None and self.used >= self.max_nodes and not self.make_room():
            self.nodes[(link << SHIFT) + REFS] -= 1
            return 0
        first = self.nodes[(parent << SHIFT) + FIRST]
        child = self._allocate((token, parent, 1, last, link, 0, first, 0, level, 0, 0, 0, 0, 0, 0, 0))
        nodes = self.nodes
        if first:
            nodes[(first << SHIFT) + PREV] = child
        nodes[(parent << SHIFT) + FIRST] = child
        shard[key] = child
        return child

    def _allocate(self, record: tuple[int, ...]) -> int:
        self.used += 1
        if self.free:
            node = self.free.pop()
            self.nodes[node << SHIFT : (node + 1) << SHIFT] = array("i", record)
            return node
        node = len(self.nodes) >> SHIFT
        self.nodes.extend(record)
        return node

    def _release(self, node: int) -> None:
        self.nodes[node << SHIFT : (node + 1) << SHIFT] = array("i", [0] * STRIDE)
        self.free.append(node)
        self.used -= 1

    def _rank(self, base: int, child: int, count: int, last: int) -> None:
        """Moves a child whose count rose to its place among the ranked: by count, then by recency."""
        nodes = self.nodes
        end = base + STRIDE
        j = base + TOP
        while j < end:
            other = nodes[j]
            if other == child or other == 0:
                break
            j += 1
        else:
            j = end - 1
            at = nodes[j] << SHIFT
            if (nodes[at + COUNT], nodes[at + LAST]) > (count, last):
                return
        top = base + TOP
        while j > top:
            other = nodes[j - 1]
            at = other << SHIFT
            other_count = nodes[at + COUNT]
            if other_count > count or (other_count == count and nodes[at + LAST] > last):
                break
            nodes[j] = other
            j -= 1
        nodes[j] = child

    def rerank(self, node: int) -> None:
        """Ranks the children of a node from scratch."""
        nodes = self.nodes
        base = node << SHIFT
        ranked = heapq.nlargest(
            RANKED,
            (
                (nodes[(c << SHIFT) + COUNT], nodes[(c << SHIFT) + LAST], c)
                for c in self.children(node)
                if nodes[(c << SHIFT) + TOKEN] != END
            ),
        )
        for j in range(RANKED):
            nodes[base + TOP + j] = ranked[j][2] if j < len(ranked) else 0

    def detach(self, node: int) -> None:
        """Takes a node without children and without links to it out of the index."""
        nodes = self.nodes
        at = node << SHIFT
        token, parent, _, _, link, _, after, before = nodes[at : at + TOKEN + 8]
        key = parent * FACTOR + token
        del self.edges[key % self.shards][key]
        if after:
            nodes[(after << SHIFT) + PREV] = before
        if before:
            nodes[(before << SHIFT) + NEXT] = after
        else:
            nodes[(parent << SHIFT) + FIRST] = after
        nodes[(link << SHIFT) + REFS] -= 1
        base = parent << SHIFT
        for j in range(base + TOP, base + STRIDE):
            if nodes[j] == node:
                nodes[j : base + STRIDE] = array("i", [*nodes[j + 1 : base + STRIDE], 0])
                break
        self._release(node)

    def make_room(self, steps: int = 96) -> bool:
        """Evicts the next node that is old and rare enough.

        A hand goes round the records, as in the clock algorithm. Where it finds too little, less old and less
        rare nodes will do. Only nodes that no longer context builds on can go, so the longest contexts go
        first.

        Returns:
          whether a node was freed within `steps` records.
        """
        nodes = self.nodes
        total = len(nodes) >> SHIFT
        hand = self.hand
        freed = False
        newest = self.position - self.window
        for _ in range(steps):
            if hand >= total:
                hand = 1
            at = hand << SHIFT
            last = nodes[at + LAST]
            if nodes[at + DEPTH] and not nodes[at + FIRST] and not nodes[at + REFS] and last < newest:
                if self.position - last > self.patience * nodes[at + COUNT]:
                    self.detach(hand)
                    hand += 1
                    freed = True
                    break
                self.patience *= 0.98
            hand += 1
        self.hand = hand
        if freed:
            self.patience = min(self.patience * 1.002, float(self.position))
        return freed

    def memory_bytes(self) -> int:
        """Bytes held, dictionaries and their integers included."""
        flat = sum(a.itemsize * len(a) for a in (self.text, self.earlier, self.nodes, self.free))
        return flat + sum(d.__sizeof__() for d in self.edges) + 64 * self.used
