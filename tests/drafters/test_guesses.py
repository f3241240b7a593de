"""Jacobi guesses: how calls refine them, and that they change no token."""

import pytest

from jaxlookahead import generate
from jaxlookahead.drafters import Draft, GuessPool, TrieDrafter
from jaxlookahead.models.dummy import tiny_decoder
from jaxlookahead.tree import draft_from_paths, draft_paths


def guesses(pool):
    return pool._requests["r"].ahead


def test_a_rejected_branch_is_refined_by_position():
    pool = GuessPool()
    pool.begin("r", [1], None)
    # After 1 the model says 5, and 2, 3, 4 was drafted: 3 becomes 13, 4 becomes 14, and 15 comes after it.
    pool.verified("r", draft_from_paths([[2, 3, 4]]), [], [[5], [13], [14], [15]])
    pool.extend("r", [5])
    assert guesses(pool) == [13, 14, 15]
    # The first guess is right. What the model says after the others takes their place.
    draft = draft_from_paths([[13, 14, 15], [50, 60]])
    pool.verified("r", draft, [0], [[13], [24], [25], [26], [0], [0]])
    pool.extend("r", [13, 24])
    assert guesses(pool) == [25, 26]
    # Of branches that were drafted beside the guesses, nothing is taken.
    pool.verified("r", draft_from_paths([[70, 71], [25, 26]]), [], [[9], [0], [0], [36], [37]])
    pool.extend("r", [9])
    assert guesses(pool) == [36, 37]
    # What was not drafted stays, and where nothing is left, the newest tokens are the guess.
    pool.verified("r", Draft(), [], [[8]])
    pool.extend("r", [8])
    assert guesses(pool) == [37]
    pool.verified("r", Draft(), [], [[37]])
    pool.extend("r", [37])
    assert guesses(pool) == [24, 9, 8]


def test_ngrams_of_rejected_branches_enter_the_pool():
    pool = GuessPool(ngram=3)
    drafter = TrieDrafter(sources=[pool], use_request=False)
    assert drafter.wants_topk == 1
    drafter.begin("r", [1])
    drafter.observe_topk("r", [1, 2, 3], [[5], [6], [7]])
    drafter.verified("r", draft_from_paths([[2, 3]]), [])
    drafter.extend("r", [5])
    # The guesses for the next places.
    assert draft_paths(drafter.draft("r", 8, 2)) == [[6, 7]]
    drafter.extend("r", [1, 2])
    found = draft_paths(drafter.draft("r", 8, 2))
    assert [6] in found and [3, 7] in found
    drafter.end("r", remember=False)
    assert not pool._requests


def test_without_topk_nothing_is_guessed():
    drafter = TrieDrafter(sources=[GuessPool()])
    drafter.begin("r", [1])
    drafter.verified("r", Draft(), [])
    drafter.extend("r", [2])
    assert not drafter.draft("r", 8, 8).tokens


@pytest.mark.parametrize("options", [{"per_token": 0}, {"ngram": 1}])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        GuessPool(**options)


def test_guesses_alone_are_accepted_and_change_no_token():
    model, params = tiny_decoder()
    prompts = [[5, 6, 7, 9], [70, 71, 72, 73]]
    options = {"max_new_tokens": 40, "rows": 1, "width": 4, "adapt": False}
    plain = generate(model, params, prompts, **options, drafter=None)
    runs = []
    for _ in range(2):
        drafter = TrieDrafter(use_request=False, use_shared=False, sources=[GuessPool()], labels=True)
        runs.append(generate(model, params, prompts, **options, drafter=drafter))
        assert [x.tokens.tolist() for x in runs[-1]] == [x.tokens.tolist() for x in plain]
    assert runs[0].stats.accepted > 0
    assert {source for x in runs[0] for source in x.sources} == {None, "guesses"}
    assert [x.sources for x in runs[0]] == [x.sources for x in runs[1]]
