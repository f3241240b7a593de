"""The trie as flat arrays says what the index says."""

from __future__ import annotations

import itertools

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np

from jaxlookahead.drafters.snapshot import NOTHING
from jaxlookahead.drafters.trie import TrieDrafter

DOCUMENTS = st.lists(st.lists(st.integers(0, 3), max_size=14), max_size=5)


def expected(documents, context, depth):
    """The same by counting strings: the longest known context, and the likeliest tokens after it, one by one."""

    def followers(string):
        found = {}
        for number, document in enumerate(documents):
            for i in range(len(document) - len(string)):
                if tuple(document[i : i + len(string)]) == string:
                    token = document[i + len(string)]
                    times, _ = found.get(token, (0, None))
                    found[token] = (times + 1, (number, i))
        return found

    for size in range(min(depth, len(context)), 0, -1):
        string = tuple(context[-size:])
        starts = [(document, i) for document in documents for i in range(len(document) - size + 1)]
        # What follows the longest contexts is told apart only while they were met once.
        often = sum(tuple(document[i : i + size]) == string for document, i in starts) > 1
        if followers(string) and not (size == depth and often):
            break
    else:
        return 0, None
    return size, followers(string)


@hypothesis.example(documents=[[0, 0, 0, 0]], context=[0, 0, 0])
@hypothesis.example(documents=[[1, 2, 3, 1], [1, 2, 3]], context=[0, 1, 2, 3])
@hypothesis.given(documents=DOCUMENTS, context=st.lists(st.integers(0, 4), min_size=1, max_size=6))
@hypothesis.settings(max_examples=25, deadline=None)
def test_match_and_first_token(documents, context):
    drafter = TrieDrafter(depth=3)
    drafter.insert([7, 7, 7], namespace="other")
    for document in documents:
        drafter.insert(document)
    snapshot = drafter.snapshot()
    history = jnp.asarray([[*context, *[9] * (6 - len(context))]], jnp.int32)
    node, size = snapshot.match(history, jnp.array([len(context)]))
    wanted_size, followers = expected(documents, context, 3)
    assert int(size[0]) == wanted_size
    tokens = np.asarray(snapshot.follow(node, 5))[0].tolist()
    if followers is None:
        assert tokens == [NOTHING] * 5
        return
    # The most frequent, and the newest of several.
    assert tokens[0] == max(followers, key=lambda token: followers[token])
    if NOTHING in tokens:
        end = tokens.index(NOTHING)
        assert set(tokens[end:]) == {NOTHING}
    text = [*context[-wanted_size:], *(token for token in tokens if token != NOTHING)]
    # Every step is one that some document took.
    pairs = {pair for document in documents for pair in itertools.pairwise(document)}
    assert set(itertools.pairwise(text)) <= pairs


def test_a_text_met_once_is_followed_to_its_end():
    drafter = TrieDrafter(depth=4)
    drafter.insert([1, 2, 3, 4, 5, 6, 7, 8, 9])
    snapshot = drafter.snapshot()
    node, size = snapshot.match(jnp.array([[3, 4]]), jnp.array([2]))
    assert int(size[0]) >= 1
    assert np.asarray(snapshot.follow(node, 7))[0].tolist() == [5, 6, 7, 8, 9, NOTHING, NOTHING]


def test_an_empty_trie_knows_nothing():
    snapshot = TrieDrafter().snapshot(namespace="new")
    node, size = snapshot.match(jnp.array([[3, 4]]), jnp.array([2]))
    assert int(size[0]) == 0 and np.asarray(snapshot.follow(node, 2)).tolist() == [[NOTHING, NOTHING]]


def test_asking_for_an_unknown_namespace_drops_no_other():
    drafter = TrieDrafter(depth=3, max_nodes=128)
    drafter.insert([1, 2, 3], namespace="a")
    before = drafter.stats()
    for i in range(3):
        drafter.snapshot(namespace=("unknown", i))
    assert drafter.stats() == before


def test_what_waits_is_put_in_first():
    drafter = TrieDrafter()
    drafter.insert(list(range(3000)), wait=False)
    assert drafter.stats()["waiting"]
    assert (np.asarray(drafter.snapshot().text) != NOTHING).sum() == 3000


def test_after_eviction_and_wrapping():
    """What a snapshot drafts is in the documents that are still held."""
    rng = np.random.default_rng(0)
    drafter = TrieDrafter(depth=3, max_nodes=400)
    documents = [rng.integers(0, 12, 40).tolist() for _ in range(60)]
    for document in documents:
        drafter.insert(document)
    snapshot = drafter.snapshot()
    pairs = {pair for document in documents for pair in itertools.pairwise(document)}
    contexts = jnp.asarray(documents[-1], jnp.int32)[None]
    found = 0
    for length in range(1, 40):
        node, size = snapshot.match(contexts, jnp.array([length]))
        tokens = [t for t in np.asarray(snapshot.follow(node, 3))[0].tolist() if t != NOTHING]
        text = [documents[-1][length - 1], *tokens]
        assert set(itertools.pairwise(text)) <= pairs
        found += bool(size[0])
    assert found > 30
