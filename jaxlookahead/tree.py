"""Draft trees as padded arrays."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxlookahead.drafters.protocol import Draft
from jaxlookahead.struct import struct

NO_PARENT = -1
ROOT = 0


@struct
class DraftTree:
    """A batch of draft trees, `N` nodes wide.

    Node 0 is the root: the newest token of the row, which the cache does not hold yet. Parents come before their
    children. A node other than the root whose parent is `NO_PARENT` is padding: nothing reaches it.
    """

    tokens: jax.Array  # [B, N] int32
    parents: jax.Array  # [B, N] int32, NO_PARENT for the root and for padding

    @property
    def width(self) -> int:
        """`N`, the root counted."""
        return self.tokens.shape[1]


def ancestor_mask(parents: jax.Array) -> jax.Array:
    """Which nodes lie on the path from the root to each node, itself included.

    Args:
      parents: `[B, N]` int32.

    Returns:
      `[B, N, N]` bool, `[b, i, j]` True where `j` is `i` or an ancestor of `i`.
    """
    width = parents.shape[-1]
    nodes = jnp.arange(width)
    reach = (parents[:, :, None] == nodes) | (nodes[:, None] == nodes)
    # Squaring the relation doubles the length of the paths it covers.
    for _ in range((width - 1).bit_length()):
        square = jnp.einsum("bij,bjk->bik", reach.astype(jnp.float32), reach.astype(jnp.float32))
        reach = square > 0
    return reach


def depths(mask: jax.Array) -> jax.Array:
    """Depth of each node, 0 at the root, from its ancestor mask `[B, N, N]`: `[B, N]` int32."""
    return jnp.sum(mask, axis=-1, dtype=jnp.int32) - 1


def find_child(tree: DraftTree, node: jax.Array, token: jax.Array) -> jax.Array:
    """The child of `node` `[B]` that holds `token` `[B]`: `[B]` int32, 0 where there is none."""
    nodes = jnp.arange(tree.width, dtype=jnp.int32)
    match = (tree.parents == node[:, None]) & (tree.tokens == token[:, None]) & (nodes > ROOT)
    first = jnp.min(jnp.where(match, nodes, tree.width), axis=-1)
    return jnp.where(first < tree.width, first, ROOT)


def normalize(draft: Draft, *, budget: int, max_depth: int, vocab_size: int) -> Draft:
    """Makes a draft from any source safe to verify.

    Nodes that can't be verified are dropped with all that hangs below them: token ids outside the vocabulary, parents
    that do not exist or form a cycle, nodes below `max_depth`. Children may stand before their parents in the input.
    Siblings with the same token become one. What is left is cut to the first `budget` nodes.

    Raises:
      ValueError: if the draft's lists differ in length.
    """
    tokens, parents = draft.tokens, draft.parents
    size = len(tokens)
    if len(parents) != size or any(x is not None and len(x) != size for x in (draft.probs, draft.sources)):
        raise ValueError(
            f"draft lists differ in length: {size} tokens, {len(parents)} parents, "
            f"{'no' if draft.probs is None else len(draft.probs)} probs, "
            f"{'no' if draft.sources is None else len(draft.sources)} sources; give each node one entry in each"
        )
    kept = Draft(
        probs=None if draft.probs is None else [],
        sources=None if draft.sources is None else [],
    )
    place: dict[int, tuple[int, int]] = {-1: (-1, 0)}  # old index -> new index, depth
    children: dict[tuple[int, int], tuple[int, int]] = {}
    waiting: Sequence[int] = range(size)
    while waiting:
        later: list[int] = []
        for i in waiting:
            parent = int(parents[i])
            if parent not in place:
                if 0 <= parent < size and parent != i:
                    later.append(i)
                continue
            above, depth = place[parent]
            token = int(tokens[i])
            if not 0 <= token < vocab_size or depth >= max_depth:
                continue
            twin = children.get((above, token))
            if twin is None:
                if len(kept.tokens) >= budget:
                    continue
                twin = children[above, token] = (len(kept.tokens), depth + 1)
                kept.tokens.append(token)
                kept.parents.append(above)
                if kept.probs is not None and draft.probs is not None:
                    kept.probs.append(float(draft.probs[i]))
                if kept.sources is not None and draft.sources is not None:
                    kept.sources.append(draft.sources[i])
            place[i] = twin
        if len(later) == len(waiting):
            break
        waiting = later
    return kept


def cut(draft: Draft, budget: int) -> Draft:
    """The first `budget` nodes of a draft whose parents come before their children."""
    if len(draft) <= budget:
        return draft
    return Draft(
        tokens=draft.tokens[:budget],
        parents=draft.parents[:budget],
        probs=None if draft.probs is None else draft.probs[:budget],
        sources=None if draft.sources is None else draft.sources[:budget],
    )


def pack(roots: Sequence[int], drafts: Sequence[Draft], width: int) -> np.ndarray:
    """Lays out normalized drafts below their roots.

    Args:
      roots: newest token of each of the `B` rows.
      drafts: a draft for each row, at most `width - 1` nodes long.
      width: `N`.

    Returns:
      `[2, B, N]` int32: tokens and parents, as `DraftTree` holds them.
    """
    packed = np.zeros((2, len(roots), width), np.int32)
    packed[1] = NO_PARENT
    packed[0, :, 0] = roots
    for row, draft in enumerate(drafts):
        size = len(draft.tokens)
        if size:
            packed[0, row, 1 : size + 1] = draft.tokens
            packed[1, row, 1 : size + 1] = draft.parents
            packed[1, row, 1 : size + 1] += 1
    return packed


def unpack(packed: np.ndarray) -> list[Draft]:
    """The drafts that `pack` laid out, without what it leaves out: probabilities and sources."""
    sizes = np.sum(packed[1] != NO_PARENT, axis=1)
    return [
        Draft(tokens=tokens[1 : size + 1].tolist(), parents=(parents[1 : size + 1] - 1).tolist())
        for tokens, parents, size in zip(*packed, sizes, strict=True)
    ]


def from_drafts(roots: Sequence[int], drafts: Sequence[Draft], width: int | None = None) -> DraftTree:
    """Builds a tree from drafts; `width` defaults to the widest draft and the root."""
    if width is None:
        width = 1 + max((len(draft) for draft in drafts), default=0)
    tokens, parents = pack(roots, drafts, width)
    return DraftTree(tokens=jnp.asarray(tokens), parents=jnp.asarray(parents))


def draft_from_paths(paths: Sequence[Sequence[int]]) -> Draft:
    """Merges token sequences that start after the newest token into one draft; common beginnings share nodes."""
    draft = Draft()
    children: dict[tuple[int, int], int] = {}
    for path in paths:
        node = -1
        for token in path:
            child = children.get((node, token))
            if child is None:
                child = children[node, token] = len(draft.tokens)
                draft.tokens.append(token)
                draft.parents.append(node)
            node = child
    return draft


def draft_paths(draft: Draft) -> list[list[int]]:
    """The token sequences from the root to each leaf of a draft, the inverse of `draft_from_paths`."""
    paths: list[list[int]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    inner = set(draft.parents)
    return [path for i, path in enumerate(paths) if i not in inner]
