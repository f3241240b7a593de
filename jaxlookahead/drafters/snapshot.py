"""A frozen trie as flat arrays, to be walked on the device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxlookahead.drafters.suffix_index import (
    COUNT,
    DEPTH,
    END,
    LAST,
    LINK,
    PARENT,
    STRIDE,
    TOKEN,
    TOP,
    SuffixIndex,
)

NOTHING = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrieSnapshot:
    """What one namespace of a `TrieDrafter` held when `TrieDrafter.snapshot` was called. A pytree of arrays.

    A node is a context of up to `depth` tokens; node 0 is the empty one. `M` nodes and `X` tokens of text, each padded
    to a power of two so that snapshots of similar size share compiled code.

    Attributes:
      first_child: `[M + 1]` int32; the children of node `i` stand at `[first_child[i], first_child[i + 1])` of
        `child_token` and `child_node`.
      child_token: `[M]` int32, rising within a node.
      child_node: `[M]` int32.
      next_token: `[M]` int32 the likeliest token after each context, `NOTHING` where none is known.
      next_node: `[M]` int32 the context after that token.
      place: `[M]` int32, for a context met once, where in `text` what followed it stands; else `NOTHING`.
      text: `[X]` int32, `NOTHING` between documents.
      depth: of the longest context, static.
    """

    first_child: jax.Array
    child_token: jax.Array
    child_node: jax.Array
    next_token: jax.Array
    next_node: jax.Array
    place: jax.Array
    text: jax.Array
    depth: int = dataclasses.field(metadata={"static": True})

    def match(self, history: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The longest context that a row's newest tokens are, among those that something is known to follow.

        Args:
          history: `[B, L]` int32.
          lengths: `[B]` int32.

        Returns:
          Its node and its length, `[B]` int32 each; 0 where there is none.
        """
        sizes = jnp.arange(1, self.depth + 1)
        nodes = jnp.zeros((len(lengths), self.depth), jnp.int32)
        found = lengths[:, None] >= sizes
        for i in range(self.depth):
            # All suffixes at once: the one of `size` tokens takes its `i`-th.
            at = jnp.maximum(lengths[:, None] - sizes + i, 0)
            token = jnp.take_along_axis(history, jnp.minimum(at, history.shape[1] - 1), axis=1)
            child = self._child(nodes, token)
            nodes = jnp.where(i < sizes, child, nodes)
            found &= nodes > 0
        known = found & ((self.next_token[nodes] != NOTHING) | (self.place[nodes] != NOTHING))
        length = jnp.max(jnp.where(known, sizes, 0), axis=1)
        node = jnp.take_along_axis(nodes, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]
        return jnp.where(length > 0, node, 0), length

    def follow(self, node: jax.Array, count: int) -> jax.Array:
        """The likeliest `count` tokens after contexts `[B]`: `[B, count]` int32, `NOTHING` from where none is known."""

        def step(state: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            node, place = state
            place = jnp.where(place == NOTHING, self.place[node], place)
            reading = place != NOTHING
            token = jnp.where(reading, self.text[jnp.maximum(place, 0)], self.next_token[node])
            ended = token == NOTHING
            node = jnp.where(reading | ended, 0, self.next_node[node])
            # Node 0 knows nothing, so what has ended stays so.
            return (node, jnp.where(reading & ~ended, place + 1, NOTHING)), token

        start = (node, jnp.full_like(node, NOTHING))
        return jnp.moveaxis(jax.lax.scan(step, start, None, length=count)[1], 0, 1)

    def within(self, vocab_size: int) -> TrieSnapshot:
        """The same without token ids from `vocab_size` on, which a model could not look up."""

        def cut(tokens: jax.Array) -> jax.Array:
            return jnp.where(tokens < vocab_size, tokens, NOTHING)

        return dataclasses.replace(self, next_token=cut(self.next_token), text=cut(self.text))

    def _child(self, nodes: jax.Array, tokens: jax.Array) -> jax.Array:
        """The children of `nodes` for `tokens`, 0 where there are none, by bisection."""
        low, high = self.first_child[nodes], self.first_child[nodes + 1]
        end = high
        for _ in range(len(self.child_token).bit_length()):
            middle = (low + high) // 2
            smaller = self.child_token[jnp.minimum(middle, len(self.child_token) - 1)] < tokens
            low, high = jnp.where(smaller & (low < high), middle + 1, low), jnp.where(smaller, high, middle)
        at = jnp.minimum(low, len(self.child_token) - 1)
        return jnp.where((low < end) & (self.child_token[at] == tokens), self.child_node[at], 0)


def take(index: SuffixIndex, root: int) -> TrieSnapshot:
    """Copies what stands below one root of an index."""
    records = np.array(index.nodes, np.int32).reshape(-1, STRIDE)
    held = _below(records, root)
    numbers = np.zeros(len(records), np.int32)
    numbers[held] = np.arange(1, len(held) + 1)
    rows = records[held]
    parents = numbers[rows[:, PARENT]]
    order = np.lexsort((rows[:, TOKEN], parents))

    text, oldest = _text(index)
    best = rows[:, TOP]
    known = best > 0
    next_token = np.where(known, records[best, TOKEN], NOTHING)
    # The longest contexts have no children: what follows them follows the context one token shorter.
    after = np.where(records[best, DEPTH] == index.depth, records[best, LINK], best)
    follower = rows[:, LAST] + 1 - oldest
    once = ~known & (rows[:, COUNT] == 1) & (follower >= 0) & (follower < len(text))
    once[once] = text[follower[once]] != NOTHING

    size = 1 << int(len(held) + 1).bit_length()
    first = np.searchsorted(parents[order], np.arange(size + 1))
    return TrieSnapshot(
        first_child=jnp.asarray(first, jnp.int32),
        child_token=_padded(rows[order, TOKEN], size, NOTHING),
        child_node=_padded(order + 1, size, 0),
        next_token=_padded(np.concatenate([[NOTHING], next_token]), size, NOTHING),
        next_node=_padded(np.concatenate([[0], np.where(known, numbers[after], 0)]), size, 0),
        place=_padded(np.concatenate([[NOTHING], np.where(once, follower, NOTHING)]), size, NOTHING),
        text=_padded(text, 1 << len(text).bit_length(), NOTHING),
        depth=index.depth,
    )


def _below(records: np.ndarray, root: int) -> np.ndarray:
    """The nodes below a root, ends of documents left out."""
    inside = np.zeros(len(records), bool)
    inside[root] = True
    for depth in range(1, int(records[:, DEPTH].max(initial=0)) + 1):
        inside |= (records[:, DEPTH] == depth) & inside[records[:, PARENT]] & (records[:, TOKEN] != END)
    inside[root] = False
    return np.flatnonzero(inside)


def _text(index: SuffixIndex) -> tuple[np.ndarray, int]:
    """The text that is still held, oldest first, and the position of its first token."""
    ring = np.array(index.text, np.int32)
    oldest = index.position - len(ring)
    text = np.roll(ring, -(oldest % max(len(ring), 1)))
    return np.where(text == END, NOTHING, text), oldest


def _padded(values: np.ndarray, size: int, fill: int) -> jax.Array:
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return jnp.asarray(out)
