"""Prompt lookup: match policies, short matches, limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlookahead.drafters.prompt_lookup import PromptLookup


def draft(text, budget=10, depth=64, **options):
    drafter = PromptLookup(**options)
    drafter.begin("r", text[:-1])
    drafter.extend("r", text[-1:])
    found = drafter.draft("r", budget, depth)
    assert found.parents == list(range(-1, len(found) - 1))
    return found.tokens


def test_A5_no_eos_configured():
    assert draft([5, 6, 7, 8, 9, 10, 11, 7, 8], length=3) == [9, 10, 11]


def test_A7_nothing_after_eos():
    assert draft([5, 6, 2, 7, 8, 5, 6], eos_ids=(2,)) == [2]
    assert draft([5, 6, 2, 7, 8, 5, 6], length=3) == [2, 7, 8]


def test_A8_newest_token_is_in_the_query():
    assert draft([1, 2, 3, 1, 2])[0] == 3


def test_A9_A10_A12_nothing_of_a_former_request():
    drafter = PromptLookup()
    drafter.begin("r", list(range(500)))
    drafter.end("r")
    drafter.begin("r", [7, *range(1000, 1049)])
    assert drafter.draft("r", 10, 10).tokens == []
    drafter.extend("r", [1000])
    assert drafter.draft("r", 3, 10).tokens == [1001, 1002, 1003]


def test_A1_requests_do_not_mix():
    drafter = PromptLookup()
    for name, text in ((0, [1, 2, 3, 1]), (1, [4, 5, 6]), (2, [7, 8, 9, 7])):
        drafter.begin(name, text)
    assert [drafter.draft(i, 2, 2).tokens for i in range(3)] == [[2, 3], [], [8, 9]]


@pytest.mark.parametrize("option", ["max_ngram", "length"])
def test_A14_options_are_taken_as_given(option):
    assert getattr(PromptLookup(**{option: 12}), option) == 12
    with pytest.raises(ValueError, match=option):
        PromptLookup(**{option: 0})


def test_A15_long_ids_and_ngrams_stay_distinct():
    text = [9, 2, 3, 4, 70000, 1, 2, 3, 4, 70001, 4464, 1, 2, 3, 4]
    assert draft(text, max_ngram=4, length=1) == [70001]
    assert draft([65536 + 5, 1, 5, 2, 65536 + 5], length=1) == [1]


def test_A25_short_match_is_drafted():
    assert draft([1, 2, 3, 1, 2]) == [3, 1, 2]
    assert draft([1, 2, 3, 1, 2], short="skip") == []
    assert draft([1, 2, 3, 1, 2], short="wrap", length=7) == [3, 1, 2, 3, 1, 2, 3]


def test_A26_match_policies():
    text = [1, 2, 100, 1, 2, 200, 1, 2]
    assert draft(text, match="latest")[0] == 200
    assert draft(text, match="earliest")[0] == 100
    text = [1, 2, 100, 1, 2, 100, 5, 1, 2, 200, 1, 2]
    assert draft(text, match="most_frequent", length=2) == [100, 5]


def test_A21_a_longer_match_takes_the_place_of_shorter_ones():
    assert draft([3, 50, 3, 51, 2, 3, 60, 2, 3], length=1) == [60]
    assert draft([2, 3, 60, 3, 50, 3, 51, 2, 3], length=1) == [60]


def test_short_longest_prefers_enough_tokens():
    text = [1, 2, 3, 4, 5, 1, 2, 1, 2]
    assert draft(text, length=5, short="keep") == [1, 2]
    assert draft(text, length=5, short="longest") == [3, 4, 5, 1, 2]
    assert draft(text, length=50, short="longest") == [3, 4, 5, 1, 2, 1, 2]


def test_A27_no_padding():
    assert draft([1, 2, 7, 1], length=40) == [2, 7, 1]


def test_F1_token_zero_is_a_token():
    assert draft([0, 0, 5, 0, 0], length=1) == [5]


def test_F10_unknown_option():
    with pytest.raises(TypeError, match="maxngram"):
        PromptLookup(maxngram=3)
    with pytest.raises(ValueError, match="newest"):
        PromptLookup(match="newest")
    with pytest.raises(ValueError, match="pad"):
        PromptLookup(short="pad")


def test_unknown_request():
    with pytest.raises(KeyError, match="begin first"):
        PromptLookup().draft("r", 1, 1)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(0, 12), st.integers(0, 12))
def test_latest_is_the_brute_force_latest(text, budget, depth):
    want = []
    limit = min(budget, depth, 10)
    for n in range(min(3, len(text)), 0, -1):
        ends = [e for e in range(n, len(text)) if text[e - n : e] == text[-n:]]
        if ends and limit:
            want = text[ends[-1] : ends[-1] + limit]
            break
    assert draft(text, budget, depth) == want
