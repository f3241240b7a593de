"""Further sources: successors, guesses, outside drafters."""

import pytest

from jaxlookahead.drafters import DrafterSource, GuessPool, OutsideDrafter, OutsideSource, SuccessorTable, TrieDrafter
from jaxlookahead.drafters.protocol import Drafter
from jaxlookahead.drafters.sources import checked_tree


def paths(draft):
    found = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_successors_are_drafted_once_observed():
    drafter = TrieDrafter(successors=3)
    assert drafter.wants_topk == 3 and TrieDrafter().wants_topk == 0
    drafter.begin("r", [1])
    assert drafter.draft("r", 8, 8).tokens == []
    drafter.observe_topk("r", [1, 5], [[5, 6, 7, 8], [9, 5, 5]])
    found = paths(drafter.draft("r", 8, 8))
    assert found[0] == (5,) and {(6,), (7,), (5, 9)} <= set(found)
    assert (8,) not in found
    drafter.begin("other", [1], namespace="n")
    assert drafter.draft("other", 8, 8).tokens == []
    with pytest.raises(ValueError, match="2 tokens but 1 rows"):
        drafter.observe_topk("r", [1, 2], [[1]])


def test_successors_are_trusted_as_they_prove_right():
    def weight(right):
        drafter = TrieDrafter(successors=1)
        for i in range(300):
            drafter.begin(i, [2 * i + 1000])
            drafter.observe_topk(i, [2 * i + 1000], [[2 * i + 1001]])
            drafter.draft(i, 4, 4)
            drafter.extend(i, [2 * i + 1001 if right else 7])
            drafter.end(i, remember=False)
        return drafter.memory.calibration(None).extra["successors"][0][0]

    assert weight(True) > 0.9 and weight(False) < 0.05


def test_successor_table_is_bounded():
    table = SuccessorTable(k=2, max_entries=10)
    for token in range(100):
        table.observe(None, [token], [[1, 2, 3]])
    assert len(table) == 10
    assert table.predict(table.open("r", None, [99], 1, 1)) and not table.predict((None, 5))
    table.forget(None)
    assert len(table) == 0


def test_guesses_follow_ngrams_of_their_own_request():
    pool = GuessPool(per_token=2)
    drafter = TrieDrafter(sources=[pool])
    for request in "ab":
        drafter.begin(request, [1])
    pool.observe("a", [1, 2, 3, 4])
    pool.observe("a", [3, 9])
    pool.observe("a", [1])
    found = paths(drafter.draft("a", 64, 8))
    assert {(2, 3, 4), (2, 3, 9)} <= set(found)
    assert drafter.draft("b", 8, 8).tokens == []
    for tail in (5, 6):
        pool.observe("a", [1, tail])
    assert (2,) not in paths(drafter.draft("a", 8, 8))
    drafter.end("a")
    drafter.begin("a", [1])
    assert drafter.draft("a", 8, 8).tokens == []


def test_outside_tree_joins_the_expansion():
    def propose(text, budget, max_depth):
        assert text == [3, 1, 2] and budget == 8 and max_depth == 4
        return [50, 51, 60], [-1, 0, -1], [0.7, 0.6, 0.2]

    drafter = TrieDrafter(sources=[OutsideSource(propose)], labels=True)
    drafter.insert([1, 2, 40])
    drafter.begin("r", [3, 1, 2])
    draft = drafter.draft("r", 8, 4)
    assert {(50,), (50, 51), (60,), (40,)} <= set(paths(draft))
    names = dict(zip(paths(draft), draft.sources, strict=True))
    assert names[(50, 51)] == "outside" and names[(40,)] == "shared"
    drafter.extend("r", [50, 51])
    weight, seen = drafter.memory.calibration(None).extra["outside"]
    assert seen[0] == 2 and weight[0] > 0.3


def test_A35_A17_A32_outside_drafts_are_cut_and_checked():
    draft = checked_tree((list(range(100)), list(range(-1, 99))), 5, 3)
    assert draft.tokens == [0, 1, 2]
    draft = checked_tree(([4, 4, 5, 6], [-1, -1, 1, 0], [0.5, 0.5, 0.2, 0.1]), 10, 9)
    assert paths(draft) == [(4,), (4, 5), (4, 6)] and draft.probs == [0.5, 0.2, 0.1]
    assert checked_tree(([-1, 7, 3], [-1, 0, -1]), 9, 9).tokens == [3]
    assert checked_tree(([], []), 9, 9).tokens == []
    for bad in (([1], [0]), ([1, 2], [-1, 5]), ([1, 2], [-1]), ([1], [-2]), ([1],), ([1], [-1], [0.1, 0.2])):
        with pytest.raises(ValueError, match="outside drafter"):
            checked_tree(bad, 9, 9)


def test_outside_drafter_alone():
    drafter = OutsideDrafter(lambda text, budget, depth: ([text[-1] + 1] * 3, [-1, 0, 1]))
    assert isinstance(drafter, Drafter)
    drafter.begin("r", [1])
    with pytest.raises(ValueError, match="begun already"):
        drafter.begin("r", [1])
    drafter.extend("r", [6])
    assert paths(drafter.draft("r", 2, 9)) == [(7,), (7, 7)]
    drafter.end("r")


def test_names_of_sources_must_differ():
    sources = [GuessPool(), GuessPool()]
    with pytest.raises(ValueError, match="distinct names"):
        TrieDrafter(sources=sources)
    with pytest.raises(ValueError, match="distinct names"):
        TrieDrafter(sources=[OutsideSource(lambda *_: ([], []), name="shared")])


def test_any_drafter_may_be_a_source():
    inner = TrieDrafter()
    drafter = TrieDrafter(sources=[DrafterSource(inner, "inner")], use_shared=False, labels=True)
    drafter.insert([1, 2, 3])
    drafter.insert([1, 7, 8], namespace="n")
    drafter.begin("r", [9, 1])
    draft = drafter.draft("r", 8, 8)
    assert paths(draft) == [(2,), (2, 3)] and set(draft.sources) == {"inner"}
    drafter.extend("r", [2, 4])
    drafter.end("r")
    drafter.begin("r", [2])
    assert (4,) in paths(drafter.draft("r", 8, 8))
    drafter.end("r", remember=False)
    assert not inner._requests
