from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlookahead import tree
from jaxlookahead.drafters.protocol import Draft

PATHS = [[5, 6, 7], [5, 8], [9]]


def brute_ancestors(parents):
    size = len(parents)
    mask = np.eye(size, dtype=bool)
    for node in range(size):
        above = parents[node]
        while above >= 0:
            mask[node, above] = True
            above = parents[above]
    return mask


@st.composite
def parent_lists(draw):
    size = draw(st.integers(1, 40))
    return [-1] + [draw(st.integers(-1, i - 1)) for i in range(1, size)]


def test_golden_tree():
    draft = tree.draft_from_paths(PATHS)
    assert draft == Draft(tokens=[5, 6, 7, 8, 9], parents=[-1, 0, 1, 0, -1])
    assert tree.draft_paths(draft) == PATHS
    batch = tree.from_drafts([1, 2], [draft, Draft()])
    assert batch.tokens.tolist() == [[1, 5, 6, 7, 8, 9], [2, 0, 0, 0, 0, 0]]
    assert batch.parents.tolist() == [[-1, 0, 1, 2, 1, 0], [-1] * 6]
    mask = tree.ancestor_mask(batch.parents)
    assert tree.depths(mask).tolist() == [[0, 1, 2, 3, 2, 1], [0] * 6]
    assert [row.nonzero()[0].tolist() for row in mask[0]] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 5]]


def test_D2_root_sees_itself_only():
    batch = tree.from_drafts([1], [tree.draft_from_paths(PATHS)])
    assert tree.ancestor_mask(batch.parents)[0, 0].tolist() == [True] + [False] * 5


@given(parent_lists())
@settings(max_examples=60, deadline=None)
def test_ancestors_equal_brute_force(parents):
    mask = np.asarray(tree.ancestor_mask(jnp.asarray([parents], jnp.int32)))[0]
    assert (mask == brute_ancestors(parents)).all()


def test_find_child():
    batch = tree.from_drafts([1, 5], [tree.draft_from_paths(PATHS), tree.draft_from_paths([[5]])])

    def find(node, token):
        return tree.find_child(batch, jnp.asarray(node), jnp.asarray(token)).tolist()

    assert find([0, 0], [9, 5]) == [5, 1]
    assert find([1, 1], [8, 5]) == [4, 0]
    # Padding holds token 0, a real token, and is nobody's child (A27, B16).
    assert find([5, 0], [0, 0]) == [0, 0]


drafts = st.lists(st.tuples(st.integers(-3, 60), st.integers(-4, 30)), max_size=30).map(
    lambda nodes: Draft(tokens=[t for t, _ in nodes], parents=[p for _, p in nodes], probs=[0.5] * len(nodes))
)


@given(drafts, st.integers(0, 20), st.integers(0, 6))
@settings(max_examples=200, deadline=None)
def test_normalize_any_draft(draft, budget, max_depth):
    """A32, A35, D16: whatever is proposed, what is verified is a tree within the limits, made of the same paths."""
    before = Draft(list(draft.tokens), list(draft.parents))
    clean = tree.normalize(draft, budget=budget, max_depth=max_depth, vocab_size=50)
    assert (draft.tokens, draft.parents) == (before.tokens, before.parents)
    assert len(clean) <= budget and len(clean.probs) == len(clean)
    assert all(0 <= token < 50 for token in clean.tokens)
    assert all(-1 <= parent < i for i, parent in enumerate(clean.parents))
    assert len(set(zip(clean.parents, clean.tokens, strict=True))) == len(clean)
    assert max((len(path) for path in tree.draft_paths(clean)), default=0) <= max_depth
    original = set()
    for i in range(len(draft)):
        path, node, seen = [], i, set()
        while 0 <= node < len(draft) and node not in seen:
            seen.add(node)
            path.append(draft.tokens[node])
            node = draft.parents[node]
        if node == -1:
            original.add(tuple(path[::-1]))
    assert {tuple(path) for path in tree.draft_paths(clean)} <= original


def test_normalize_keeps_a_good_draft():
    draft = tree.draft_from_paths(PATHS)
    assert tree.normalize(draft, budget=5, max_depth=3, vocab_size=50) == draft


def test_normalize_merges_twins_and_sorts():
    draft = Draft(tokens=[7, 5, 5, 8], parents=[2, -1, -1, 1], sources=["a", "b", "c", "d"])
    clean = tree.normalize(draft, budget=9, max_depth=9, vocab_size=50)
    assert tree.draft_paths(clean) == [[5, 8], [5, 7]]
    assert clean.sources == ["b", "d", "a"]


def test_normalize_refuses_uneven_lists():
    with pytest.raises(ValueError, match="2 tokens, 1 parents"):
        tree.normalize(Draft(tokens=[1, 2], parents=[-1]), budget=4, max_depth=4, vocab_size=9)
