"""Merging of memories made on several machines."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlookahead.drafters import TrieDrafter

texts_of = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), max_size=3)


def made(texts, namespace=None):
    drafter = TrieDrafter()
    for i, text in enumerate(texts):
        drafter.begin(i, text[:1], namespace=namespace)
        drafter.extend(i, text)
        drafter.end(i)
    return drafter


def contexts(drafter):
    memory = drafter.memory
    return {name: memory.index.contexts(root) for name, root in memory.roots.items()}


def probes(drafter):
    drafts = []
    for prompt in ([0, 1], [2, 3, 0], [1], [3]):
        drafter.begin("probe", prompt)
        drafts.append(drafter.draft("probe", 24, 10))
        drafter.end("probe", remember=False)
    return drafts


@settings(max_examples=40, deadline=None)
@given(texts_of, texts_of, texts_of)
def test_merge_does_not_depend_on_order(one, two, three):
    results = []
    for order in itertools.permutations((one, two, three)):
        merged = TrieDrafter()
        merged.merge(*(made(texts) for texts in order))
        results.append((contexts(merged), probes(merged)))
    assert all(result == results[0] for result in results)
    whole = made(one + two + three)
    assert results[0][0].get(None, {}) == contexts(whole).get(None, {})


def test_merge_keeps_namespaces_keys_and_what_was_learnt():
    one = made([[1, 2, 3]] * 5)
    two = made([[1, 2, 4]] * 3, namespace="n")
    two.set_parent("n", None)
    one.merge(two)
    assert contexts(one)[None][(2, 3)] == 5 and contexts(one)["n"][(2, 4)] == 3
    assert list(one.memory.ancestors("n")) == [None]
    assert contexts(two) == contexts(made([[1, 2, 4]] * 3, namespace="n"))
    seen = [sum(one.memory.calibrations[name].copy_seen) for name in (None, "n")]
    assert seen[1] == sum(two.memory.calibrations["n"].copy_seen) and seen[0] > 0
    assert one.forget(4) == 1 and contexts(one)[None][(2, 3)] == 4
    assert one.forget(0) == 2


def test_what_cannot_be_merged():
    with pytest.raises(ValueError, match="depth 6 and 5"):
        TrieDrafter().merge(TrieDrafter(depth=5))
    one, two = TrieDrafter(), TrieDrafter()
    one.set_parent("a", None)
    two.set_parent("a", "b")
    with pytest.raises(ValueError, match="falls back on"):
        one.merge(two)
