"""Live requests of a namespace draft from each other."""

from hypothesis import given
from hypothesis import strategies as st

from jaxlookahead import Sampling, generate
from jaxlookahead.drafters import TrieDrafter
from jaxlookahead.models.dummy import tiny_decoder

PROMPT = [9, 8, 7]


def paths(draft):
    found = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


def test_tokens_of_siblings_are_drafted_at_once():
    drafter = TrieDrafter(labels=True)
    drafter.begin("a", PROMPT)
    drafter.begin("b", PROMPT)
    drafter.begin("elsewhere", PROMPT, namespace="n")
    drafter.extend("a", [1, 2])
    assert (1, 2) in paths(drafter.draft("b", 8, 8))
    drafter.extend("a", [3, 4])
    draft = drafter.draft("b", 8, 8)
    assert (1, 2, 3, 4) in paths(draft) and set(draft.sources) == {"siblings"}
    assert not drafter.draft("elsewhere", 8, 8).tokens
    # Nothing of its own is drafted by the detour over a sibling.
    assert not drafter.draft("a", 8, 8).tokens
    # Apart, then alike again.
    drafter.extend("b", [50])
    assert not drafter.draft("b", 8, 8).tokens
    drafter.extend("b", [1, 2, 3])
    assert (4,) in paths(drafter.draft("b", 8, 8))
    drafter.end("a", remember=False)
    assert not drafter.draft("b", 8, 8).tokens


def test_prompts_of_siblings_are_context_only():
    drafter = TrieDrafter()
    drafter.begin("a", [20, 21, 22, 23, 24])
    drafter.extend("a", [1])
    drafter.begin("b", [20, 21, 22])
    assert not drafter.draft("b", 8, 8).tokens
    drafter.begin("c", [22, 23, 24])
    assert drafter.draft("c", 8, 8).tokens == [1]


def test_siblings_vote():
    drafter = TrieDrafter()
    for name, token in zip("abcd", (1, 2, 2, 3), strict=True):
        drafter.begin(name, PROMPT)
        drafter.extend(name, [token])
    drafter.begin("r", PROMPT)
    draft = drafter.draft("r", 3, 1)
    assert draft.tokens == [2, 3, 1]
    assert draft.probs[0] > draft.probs[1] == draft.probs[2]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=2, max_size=5),
    st.sets(st.integers(0, 4)),
)
def test_what_ended_unremembered_leaves_no_trace(texts, gone):
    def drafts(without):
        drafter = TrieDrafter(use_request=False)
        drafter.begin("r", PROMPT)
        for i, text in enumerate(texts):
            if i not in without:
                drafter.begin(i, PROMPT)
                drafter.extend(i, text)
        for i in gone - without:
            if i < len(texts):
                drafter.end(i, remember=False)
        return drafter.draft("r", 16, 8), drafter._live

    draft, live = drafts(set())
    assert draft == drafts(gone)[0]
    for places in live._places.values():
        assert all(request not in gone for found in places.values() for request in found)


def test_siblings_take_fewer_calls_with_the_same_tokens():
    model, params = tiny_decoder()
    prompts = [[70, 71, 72, 73], [33, 44, 55]]
    options = {"max_new_tokens": [20, 36], "rows": 2, "width": 2, "adapt": False, "namespaces": ["p", "q"]}

    def run(drafter, temperature):
        sampling = [Sampling(num_samples=n, temperature=temperature, seed=1) for n in (1, 2)]
        return generate(model, params, prompts, **options, sampling=sampling, drafter=drafter)

    for temperature in (0.0, 0.3):
        plain = run(None, temperature)
        alone = run(TrieDrafter(use_siblings=False), temperature)
        together = run(TrieDrafter(), temperature)
        for drafted in (alone, together):
            assert [x.tokens.tolist() for x in drafted] == [x.tokens.tolist() for x in plain]
        if not temperature:
            # The second sample of the second prompt gets its row when the first prompt is done.
            assert together.stats.steps < alone.stats.steps < plain.stats.steps


def test_long_matches_outvote_short_ones():
    drafter = TrieDrafter()
    long, short = list(range(20, 32)), [1, 2, 29, 30, 31]
    for name, text in (("a", [*long, 50]), ("b", [*short, 60]), ("c", [*short, 60])):
        drafter.begin(name, [9])
        drafter.extend(name, text)
    drafter.begin("r", [9])
    drafter.extend("r", long)
    assert drafter.draft("r", 4, 1).tokens == [50]
    drafter.begin("s", [9])
    drafter.extend("s", [7, 29, 30, 31])
    draft = drafter.draft("s", 4, 1)
    assert draft.tokens == [60, 50] and draft.probs[0] > draft.probs[1]


def test_siblings_may_come_and_go_between_a_draft_and_its_outcome():
    drafter = TrieDrafter()
    drafter.insert([1, 2, 3], namespace="up")
    for name in "ab":
        drafter.begin(name, PROMPT, namespace="n")
    drafter.extend("a", [1, 2, 3, 4])
    draft = drafter.draft("b", 4, 4)
    drafter.end("a", remember=False)
    # As many further sources as before, but others.
    drafter.set_parent("n", "up")
    drafter.verified("b", draft, [0])
    drafter.extend("b", [1, 2])
    assert drafter.draft("b", 4, 4).tokens == [3]
