from __future__ import annotations

import numpy as np
import pytest

from jaxlookahead.bench.equality import Comparison, compare, make_cases, read_prompts, settings
from jaxlookahead.checkpoints.load import load
from jaxlookahead.results import Output, Stats


def test_cases_mix_all_settings():
    cases = make_cases([[1], [2, 3], [4], [5]], 2, 50)
    assert len(cases) == 4 * 2 * 16 and len({case.request_id for case in cases}) == len(cases)
    assert {(tuple(x.prompt), x.sampling.seed) for x in cases} == {
        (p, s) for p in [(1,), (2, 3), (4,), (5,)] for s in (0, 1)
    }
    some = make_cases([[1], [2, 3], [4], [5]], 2, 50, per_seed=2)
    assert len(some) == 16 and {case.setting for case in some} == set(settings(50))


def test_compare_on_a_small_model(tiny):
    cases = make_cases([[1, 2, 3], [4]], 1, 50, per_seed=4)
    found = compare(*tiny, cases, max_new_tokens=8, rows=8, width=2, attacks=["random"], alone=2)
    assert [x.sequences for x in found] == [8, 8, 8, 2, 2, 2]
    assert sum(x.failures for x in found) == 0 and found[0].accepted > 8


def test_a_difference_is_a_failure_unless_it_is_a_tie():
    scores = {"logprob": np.zeros(3, np.float32)}

    def output(tokens, margin):
        margins = np.full(3, margin, np.float32)
        return Output(0, 0, np.array(tokens), np.ones(3, bool), [None] * 3, margins, scores, "length", Stats())

    comparison = Comparison("x")
    comparison.add("a", output([1, 2, 3], 0.5), output([1, 2, 3], 0.5))
    comparison.add("b", output([1, 2, 3], 0.5), output([1, 4, 3], 2e-5))
    assert (comparison.equal, comparison.failures, comparison.tokens) == (1, 0, 4)
    comparison.add("c", output([1, 2, 3], 0.5), output([1, 2, 4], 0.5))
    comparison.add("d", output([1, 2, 3], np.nan), output([7, 2, 4], np.nan))
    assert (comparison.equal, comparison.failures, comparison.tokens) == (1, 2, 6)
    assert "2 of them with a margin over 0.0001" in str(comparison) and "c: token 2, margin 0.5" in str(comparison)


def test_prompts_are_chosen_by_length(tmp_path):
    path = tmp_path / "traces.jsonl"
    path.write_text('{"prompt": [1, 2, 3]}\n{"prompt": [4]}\n{"prompt": [5]}\n')
    assert read_prompts(path, 2, 2) == [[4], [5]]
    with pytest.raises(SystemExit, match="2 prompts of at most 2 tokens, 3 are needed"):
        read_prompts(path, 3, 2)


@pytest.mark.real
def test_real_model(shared_rows):
    """B20, B22 to B24, B34: every setting, one sequence each; the whole check is `jaxlookahead.bench.equality`."""
    loaded = load(tokenizer=None)
    prompts = [row["prompt"] for row in shared_rows("goldens.jsonl") if len(row["prompt"]) < 64][:4]
    cases = make_cases(prompts, 2, loaded.model.vocab_size, per_seed=2)
    assert len({case.setting for case in cases}) == 16
    options = dict(max_new_tokens=20, eos_ids=loaded.eos_ids, width=4, attacks=["random"], nonsense=8, alone=2)
    for comparison in compare(loaded.model, loaded.params, cases, **options):
        assert comparison.failures == 0, comparison
        assert comparison.gaps["logprob_raw"] < 1e-3
