from __future__ import annotations

import pytest

from jaxlookahead.bench import soak
from jaxlookahead.models.dummy import tiny_decoder


@pytest.fixture(scope="module")
def small():
    return tiny_decoder(vocab_size=40, num_layers=1, seed=3)


def test_responses_are_those_of_single_runs_and_nothing_compiles_twice(small):
    report = soak.soak(*small, requests=64, different=16, max_new_tokens=12, max_nodes=512, width=2, batch=4)
    assert report.requests >= 64 and report.tokens > 6 * 64
    assert (report.different, report.twice) == (0, [])
    assert report.nodes == report.max_nodes == 512
    assert len(report.resident) >= 12 and report.growth < 64 << 20


def test_a_difference_is_found(small, monkeypatch):
    model, params = small
    decode = soak.decode

    def wrong(model, params, requests, **options):
        outputs = decode(model, params, requests, **options)
        if options["drafter"] is not None:
            outputs[0].tokens[0] += 1
            outputs[0].margins[:] = 1
        return outputs

    monkeypatch.setattr(soak, "decode", wrong)
    report = soak.soak(model, params, requests=8, different=8, max_new_tokens=4, max_nodes=512, width=2, batch=4)
    assert report.different >= 2
