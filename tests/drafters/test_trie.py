"""The trie drafter: what is drafted from what, limits, isolation, memory."""

import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlookahead.drafters import Draft, TrieDrafter, expansion
from jaxlookahead.drafters.estimates import estimate, mover
from jaxlookahead.drafters.memory import BURST
from jaxlookahead.drafters.protocol import Drafter
from jaxlookahead.drafters.suffix_index import END, SuffixIndex

texts_of = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=30), max_size=5)


def paths(draft: Draft) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def check_tree(draft: Draft, budget: int, max_depth: int) -> None:
    assert len(draft) <= budget
    assert all(-1 <= parent < i for i, parent in enumerate(draft.parents))
    assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft)
    assert all(len(path) <= max_depth for path in paths(draft))
    assert len(draft.probs) == len(draft)
    assert all(0 <= prob <= 1 for prob in draft.probs)
    for prob, parent in zip(draft.probs, draft.parents, strict=True):
        assert parent < 0 or prob <= draft.probs[parent] + 1e-12


def drafted(drafter, prompt, budget=32, depth=64, namespace=None):
    drafter.begin("probe", prompt, namespace=namespace)
    draft = drafter.draft("probe", budget, depth)
    drafter.end("probe", remember=False)
    return draft


def test_is_a_drafter():
    assert isinstance(TrieDrafter(), Drafter)


def test_A1_requests_do_not_mix():
    drafter = TrieDrafter()
    drafter.begin(0, [1, 2, 3, 1])
    drafter.begin(1, [4, 5, 6])
    drafter.begin(2, [7, 8, 9, 7])
    assert (8 not in {p[0] for p in paths(drafter.draft(0, 8, 8))}) and (2,) in paths(drafter.draft(0, 8, 8))
    assert drafter.draft(1, 8, 8).tokens == []
    assert (8, 9, 7) in paths(drafter.draft(2, 8, 8))


@pytest.mark.parametrize(("budget", "depth"), [(0, 5), (5, 0), (1, 1), (3, 2), (2, 9)])
def test_A4_A23_budget_and_depth_are_kept(budget, depth):
    drafter = TrieDrafter()
    drafter.insert(range(40))
    draft = drafted(drafter, [3, 4, 5], budget, depth)
    check_tree(draft, budget, depth)
    assert len(draft) == min(budget, depth)


def test_A5_no_eos_configured():
    draft = drafted(TrieDrafter(), [5, 6, 7, 8, 9, 10, 11, 7, 8])
    assert (9, 10, 11) in paths(draft)


def test_A7_nothing_after_eos():
    prompt = [5, 6, 2, 7, 8, 5, 6]
    assert (2, 7) in paths(drafted(TrieDrafter(), prompt))
    assert not any(2 in path[:-1] for path in paths(drafted(TrieDrafter(eos_ids=[2]), prompt)))


def test_A8_the_newest_token_is_in_the_context():
    drafter = TrieDrafter()
    drafter.begin("r", [1, 2, 3, 1])
    drafter.extend("r", [2])
    assert drafter.draft("r", 1, 1).tokens == [3]


def test_A9_A10_F7_nothing_of_a_former_request_unless_remembered():
    drafter = TrieDrafter()
    drafter.begin("r", list(range(500)))
    drafter.extend("r", [1, 2])
    drafter.end("r", remember=False)
    drafter.begin("r", [300, 301, 302])
    assert drafter.draft("r", 32, 32).tokens == []
    drafter.end("r", remember=False)
    drafter.begin("r", [10, 11, 12])
    drafter.extend("r", [600, 601, 602])
    drafter.end("r")
    # The response is remembered, the prompt is not.
    assert (601, 602) in paths(drafted(drafter, [600]))
    assert drafted(drafter, [10, 11]).tokens == []
    drafter = TrieDrafter(remember_prompts=True)
    drafter.begin("r", [10, 11, 12])
    drafter.extend("r", [600])
    drafter.end("r")
    assert (11, 12, 600) in paths(drafted(drafter, [10]))


def test_A15_token_ids_stay_distinct():
    drafter = TrieDrafter()
    drafter.insert([65536 + 7, 1])
    drafter.insert([7, 2])
    drafter.insert([1_000_000, 3])
    assert drafted(drafter, [7]).tokens == [2]
    assert drafted(drafter, [65536 + 7]).tokens == [1]
    assert drafted(drafter, [1_000_000]).tokens == [3]


def test_A20_length_of_match_does_not_take_the_whole_budget():
    drafter = TrieDrafter()
    drafter.insert([1, 2, 3, 90, 91, 92, 93, 94, 95, 96])
    for i in range(50):
        drafter.insert([200 + i, 3, 5])
    found = paths(drafted(drafter, [1, 2, 3], budget=8))
    assert (90,) in found and (5,) in found


def test_A22_memory_is_bounded_over_many_requests():
    drafter = TrieDrafter(max_nodes=4000)
    rng = random.Random(0)
    for i in range(3000):
        namespace = i if i % 2 else None
        drafter.begin(i, [rng.randrange(50) for _ in range(4)], namespace=namespace)
        drafter.extend(i, [rng.randrange(50) for _ in range(4)])
        drafter.end(i)
        assert drafter.stats()["nodes"] <= 4000
    memory = drafter.memory
    assert len(memory.roots) <= 4000 // 64 + 1
    assert len(memory.documents) <= 4000 and len(memory._by_key) <= 4000
    assert len(memory.calibrations) <= 256 and not memory._held and not drafter._requests


def test_A24_one_token_context_matches():
    drafter = TrieDrafter()
    drafter.insert([7, 8])
    assert drafted(drafter, [7]).tokens == [8]


def test_A25_A27_short_match_is_drafted_without_padding():
    draft = drafted(TrieDrafter(), [1, 2, 3, 1, 2], budget=3)
    assert (3, 1, 2) in paths(draft)
    drafter = TrieDrafter()
    drafter.insert([1, 2, 8, 9])
    assert drafted(drafter, [1, 2]).tokens == [8, 9]


def test_A28_F5_never_across_documents_but_across_turns():
    drafter = TrieDrafter()
    drafter.insert([50, 1, 2])
    drafter.insert([3, 4, 5])
    assert drafted(drafter, [50, 1, 2]).tokens == []
    drafter.insert([60, 61, 0, 62, 63, 0, 64, 65])
    assert (64, 65) in paths(drafted(drafter, [62, 63, 0]))
    assert (62, 63, 0, 64, 65) in paths(drafted(drafter, [61, 0]))


@given(texts_of, st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 20), st.integers(0, 10))
def test_A30_same_calls_same_drafts(texts, prompt, budget, depth):
    def run():
        drafter = TrieDrafter()
        for text in texts:
            drafter.insert(text)
        drafter.begin("r", prompt)
        drafts = []
        for token in prompt[:5]:
            drafter.extend("r", [token])
            drafts.append(drafter.draft("r", budget, depth))
        return drafts

    first = run()
    assert first == run()
    for draft in first:
        check_tree(draft, budget, depth)


def test_F1_token_zero_is_a_token():
    drafter = TrieDrafter()
    drafter.insert([5, 0, 0, 6])
    assert (0, 0, 6) in paths(drafted(drafter, [5]))
    assert (6,) in paths(drafted(drafter, [5, 0, 0]))
    assert drafted(drafter, [9, 0], budget=2).tokens


def test_F3_prompt_copy_stays_among_many_outputs():
    drafter = TrieDrafter()
    for i in range(100):
        drafter.insert([7, 8, 1000 + i % 40, 2000 + i])
    prompt = [7, 8, 500, 501, 502, 9, 7, 8]
    assert (500, 501, 502) in paths(drafted(drafter, prompt, budget=32))


def test_F4_exact_copy_beats_unigrams():
    drafter = TrieDrafter()
    for i in range(60):
        drafter.insert([8, 1000 + i, 8, 1100 + i])
    prompt = [7, 8, 500, 501, 502, 503, 504, 505, 506, 9, 3, 7, 8]
    assert (500, 501, 502, 503, 504, 505, 506) in paths(drafted(drafter, prompt, budget=32))


def test_A14_F10_unknown_and_meaningless_options():
    assert TrieDrafter(depth=12).memory.index.depth == 12
    with pytest.raises(TypeError, match="branch_length"):
        TrieDrafter(branch_length=8)
    for options in (
        {"mode": "hier"},
        {"vocab_size": 0},
        {"successors": -1},
        {"depth": 0},
        {"depth": 5000},
        {"max_nodes": 10},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            TrieDrafter(**options)


def test_F11_newest_text_survives_ten_times_the_capacity():
    drafter = TrieDrafter(max_nodes=3000)
    rng = random.Random(0)
    for i in range(150):
        text = [rng.randrange(1000) for _ in range(200)]
        drafter.insert(text)
        assert drafter.stats()["nodes"] <= 3000
        assert tuple(text[150:160]) in paths(drafted(drafter, text[140:150])), i


def test_errors_name_what_is_wrong():
    drafter = TrieDrafter(vocab_size=100)
    for bad in ([100], [-1], ["a"], [1.5], [[1]]):
        with pytest.raises(ValueError, match="token id"):
            drafter.insert(bad)
    drafter.begin("r", [1])
    with pytest.raises(ValueError, match="begun already"):
        drafter.begin("r", [1])
    with pytest.raises(ValueError, match="100"):
        drafter.extend("r", [1, 100])
    for call in (lambda: drafter.draft("s", 1, 1), lambda: drafter.extend("s", [1]), lambda: drafter.end("s")):
        with pytest.raises(KeyError, match="begin first"):
            call()
    drafter.insert(np.array([1, 2, 3], np.int32))
    drafter.extend("r", np.array([1], np.int64))
    assert (2, 3) in paths(drafter.draft("r", 6, 2))


def test_empty_prompt_and_empty_response():
    drafter = TrieDrafter()
    drafter.begin("r", [])
    assert len(drafter.draft("r", 4, 4)) == 0
    drafter.end("r")
    assert drafter.stats()["documents"] == 0


def test_modes():
    drafter = TrieDrafter()
    for tail in ([2, 3, 4], [2, 5, 6], [7, 8, 9], [7, 8, 1]):
        drafter.insert([1, *tail])
    for mode, most in (("tree", 9), ("parallel", 2), ("single", 1)):
        drafter.mode = mode
        draft = drafted(drafter, [1])
        check_tree(draft, 32, 64)
        children: dict[int, int] = {}
        for parent in draft.parents:
            children[parent] = children.get(parent, 0) + 1
        assert children[-1] <= most
        if mode != "tree":
            assert all(count == 1 for parent, count in children.items() if parent >= 0)
    drafter.mode = "tree"
    assert {(2, 3), (2, 5), (7, 8, 9), (7, 8, 1)} <= paths(drafted(drafter, [1]))


def test_sources_on_and_off_and_labels():
    options = {"labels": True}
    drafter = TrieDrafter(**options)
    drafter.insert([1, 2, 30])
    prompt = [1, 2, 40, 9, 1, 2]
    draft = drafted(drafter, prompt)
    by_path = dict(zip([(t,) for t in draft.tokens], draft.sources, strict=True))
    assert by_path[(30,)] == "shared" and by_path[(40,)] == "request"
    assert len(draft.sources) == len(draft)
    drafter.use_shared = False
    assert (30,) not in paths(drafted(drafter, prompt)) and (40,) in paths(drafted(drafter, prompt))
    drafter.use_shared, drafter.use_request = True, False
    assert (30,) in paths(drafted(drafter, prompt)) and (40,) not in paths(drafted(drafter, prompt))


def test_namespaces_are_separate():
    def run(others):
        drafter = TrieDrafter()
        drafter.insert([1, 2, 3], namespace="a")
        if others:
            for i in range(50):
                drafter.insert([1, 9, 9, i % 7], namespace="b")
                drafter.begin(i, [1, 9], namespace="b")
                drafter.draft(i, 8, 8)
                drafter.extend(i, [9, 9])
                drafter.end(i)
            drafter.insert([1, 8, 8])
        drafts = []
        drafter.begin("r", [5, 1], namespace="a")
        for token in (2, 3, 1):
            drafts.append(drafter.draft("r", 16, 16))
            drafter.extend("r", [token])
        return drafts

    assert run(False) == run(True)
    assert (2, 3) in paths(run(True)[0])


def test_namespace_falls_back_on_its_parents():
    drafter = TrieDrafter()
    drafter.insert([1, 2, 3])
    drafter.insert([1, 4, 5], namespace="tenant")
    assert (2, 3) not in paths(drafted(drafter, [1], namespace="tenant"))
    drafter.set_parent("tenant", None)
    drafter.set_parent(("tenant", 1), "tenant")
    assert {(2, 3), (4, 5)} <= paths(drafted(drafter, [1], namespace="tenant"))
    assert {(2, 3), (4, 5)} <= paths(drafted(drafter, [1], namespace=("tenant", 1)))
    assert (4,) not in paths(drafted(drafter, [1]))
    for child, parent in ((None, "tenant"), ("tenant", "tenant"), ("tenant", ("tenant", 1))):
        with pytest.raises(ValueError, match="fall back"):
            drafter.set_parent(child, parent)


def test_forget_a_request_and_a_namespace():
    drafter = TrieDrafter()
    drafter.insert([1, 2, 3])
    before = drafted(drafter, [1])
    drafter.begin("r", [9])
    drafter.extend("r", [1, 7, 8])
    drafter.end("r")
    assert (7, 8) in paths(drafted(drafter, [1]))
    assert drafter.forget("r") == 1
    assert drafter.forget("r") == 0
    assert paths(drafted(drafter, [1])) == paths(before)
    drafter.insert([1, 5], namespace="n")
    drafter.begin("live", [1], namespace="n")
    with pytest.raises(ValueError, match="live requests"):
        drafter.forget_namespace("n")
    drafter.end("live", remember=False)
    drafter.forget_namespace("n")
    assert drafted(drafter, [1], namespace="n").tokens == []
    assert paths(drafted(drafter, [1])) == paths(before)


def test_A21_all_documents_of_a_key_are_dropped():
    drafter = TrieDrafter()
    drafter.insert([1, 2], key="short")
    drafter.insert([1, 2], key="short")
    drafter.insert([1, 2, 3], key="long")
    assert drafter.forget("short") == 2
    assert drafter.stats()["documents"] == 1
    assert drafter.memory.index.contexts(drafter.memory.root(None))[(1,)] == 1
    assert drafted(drafter, [1]).tokens == [2, 3]


@settings(max_examples=60, deadline=None)
@given(texts_of, st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(1, 24))
def test_draft_is_the_best_first_tree_of_the_estimates(texts, prompt, budget):
    with pytest.MonkeyPatch.context() as patch:
        # Without a floor, nothing is left out of the estimates for being small.
        patch.setattr(expansion, "FLOOR", 0.0)
        best_first(texts, prompt, budget)


def best_first(texts, prompt, budget):
    drafter = TrieDrafter()
    for text in texts:
        drafter.insert(text)
    drafter.begin("r", prompt)
    drafter.extend("r", prompt[::-1])
    state = drafter._state("r")
    found = drafter._texts(state)
    draft = drafter.draft("r", budget, 5)
    probs = dict(zip([tuple(p) for p in ordered_paths(draft)], draft.probs, strict=True))
    move = mover(found)
    # By hand: the probability of every path down to where it no longer matters.
    expected: dict[tuple[int, ...], float] = {}

    def expand(place, path, prob):
        if len(path) < 5:
            for token, share in estimate(found, place).items():
                if token != END and prob * share >= 1e-4:
                    expected[(*path, token)] = prob * share
                    expand(move(place, token), (*path, token), prob * share)

    expand(state.locate(found), (), 1.0)
    assert len(draft) == budget or len(draft) >= len(expected)
    for path, prob in probs.items():
        assert prob < 1e-4 or expected[path] == pytest.approx(prob)
    worst = min(probs.values(), default=0.0)
    assert all(path in probs for path, prob in expected.items() if prob > worst + 1e-9)


def ordered_paths(draft):
    found = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def test_estimates_are_learnt():
    def first_prob(truth):
        drafter = TrieDrafter()
        for i in range(200):
            drafter.begin(i, [1, 2, 3, 9, 1, 2])
            drafter.extend(i, [truth(i)])
            drafter.end(i, remember=False)
        draft = drafted(drafter, [1, 2, 3, 9, 1, 2])
        return max(p for t, p in zip(draft.tokens, draft.probs, strict=True) if t == 3)

    assert first_prob(lambda i: 3) > 0.9
    assert first_prob(lambda i: 4) < 0.1
    assert 0.35 < first_prob(lambda i: 3 + i % 2) < 0.65


def test_threads_may_draft_while_another_inserts():
    drafter = TrieDrafter(max_nodes=5000)
    rng = random.Random(0)
    documents = [[rng.randrange(30) for _ in range(300)] for _ in range(30)]
    problems = []

    def write():
        for document in documents:
            drafter.insert(document)

    def read(name):
        try:
            for document in documents:
                drafter.begin(name, document[:40])
                for i in range(40, 80, 4):
                    check_tree(drafter.draft(name, 16, 8), 16, 8)
                    drafter.extend(name, document[i : i + 4])
                drafter.end(name)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=write), *(threading.Thread(target=read, args=(n,)) for n in "ab")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert drafter.stats()["nodes"] <= 5000
    assert drafter.stats()["documents"] > 0


def test_F11_no_call_puts_in_more_than_a_burst_and_none_looks_at_many_records(monkeypatch):
    drafter = TrieDrafter(max_nodes=3000)
    rng = random.Random(0)
    text = [rng.randrange(50) for _ in range(3 * BURST)]
    most_records = 0
    push = SuffixIndex.push

    def counted(index, *args):
        nonlocal pushed, most_records
        before, total = index.hand, len(index.nodes) // 16
        found = push(index, *args)
        if index is drafter.memory.index:
            pushed += 1
            most_records = max(most_records, (index.hand - before) % total)
        return found

    monkeypatch.setattr(SuffixIndex, "push", counted)
    calls = [
        lambda: drafter.insert(text, wait=False),
        lambda: drafter.begin("r", [1]),
        lambda: drafter.extend("r", text[:BURST]),
        lambda: drafter.end("r"),
        *[drafter.idle] * 4,
    ]
    for call in calls:
        pushed = 0
        call()
        # And one for the end of each of the documents.
        assert pushed <= BURST + 2
    assert drafter.stats()["waiting"] == 0 and drafter.stats()["tokens"] == 4 * BURST
    assert text[BURST - 1] in drafted(drafter, text[BURST - 9 : BURST - 1]).tokens
    assert 0 < most_records < 2 * 6 * 96


def test_whoever_needs_all_text_gets_it(tmp_path):
    text = [i % 1000 for i in range(2 * BURST)]

    def waiting():
        drafter = TrieDrafter()
        drafter.insert(text, wait=False, key="k", namespace="n")
        assert drafter.stats()["waiting"] == BURST
        return drafter

    assert waiting().forget("k") == 1
    drafter = waiting()
    drafter.forget_namespace("n")
    assert drafter.stats()["nodes"] == 0 and drafter.stats()["waiting"] == 0
    drafter = waiting()
    drafter.save(tmp_path / "trie")
    for other in (TrieDrafter(), waiting()):
        other.load(tmp_path / "trie")
        assert other.stats()["tokens"] == len(text) and other.stats()["waiting"] == 0
    drafter = waiting()
    drafter.merge(waiting())
    assert drafter.stats()["tokens"] == 2 * len(text)
    drafter = waiting()
    drafter.insert([1, 2], namespace="n")
    assert drafter.stats()["waiting"] == 0 and not drafter.memory._held


@pytest.mark.parametrize("change", ["parent", "load", "evict"])
def test_a_parents_text_may_change_between_a_draft_and_its_outcome(change, tmp_path):
    """The request finds its place anew; it neither fails nor goes round for ever."""
    drafter = TrieDrafter(depth=3, max_nodes=300, use_request=False)
    drafter.insert(list(range(20)) * 3, namespace="p")
    drafter.insert([1, 2, 40, 41], namespace="q")
    drafter.set_parent("n", "p")
    drafter.begin("r", [0, 1, 2], namespace="n")
    draft = drafter.draft("r", 4, 4)
    assert draft.tokens[:2] == [3, 4]
    if change == "parent":
        drafter.set_parent("n", "q")
        wanted = 40
    elif change == "load":
        other = TrieDrafter(depth=3)
        other.insert([1, 2, 50], namespace="p")
        other.set_parent("n", "p")
        other.save(tmp_path / "memory")
        drafter.load(tmp_path / "memory")
        wanted = 50
    else:
        rng = random.Random(0)
        for _ in range(40):
            drafter.insert([rng.randrange(100, 200) for _ in range(50)], namespace="other")
        drafter.insert([1, 2, 60], namespace="p")
        wanted = 60
    drafter.verified("r", draft, [])
    drafter.extend("r", [77, 1, 2])
    assert drafter.draft("r", 1, 1).tokens == [wanted]
