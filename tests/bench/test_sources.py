"""Counts of calls by source are those of decoding."""

import pytest

from jaxlookahead.bench.sources import Answers, count_calls, make_drafters, measure
from jaxlookahead.decoding import generate
from jaxlookahead.models.dummy import tiny_decoder


@pytest.fixture(scope="module")
def decoded():
    model, params = tiny_decoder()
    prompts = [[5, 6, 7, 5, 6], [5, 6, 7, 9], [11] * 70]
    outputs = generate(model, params, prompts, max_new_tokens=40, drafter=None)
    return model, params, [(prompt, output.tokens.tolist()) for prompt, output in zip(prompts, outputs, strict=True)]


def test_counts_equal_decoding(decoded):
    model, params, texts = decoded
    names = ("all", "without shared")
    counting, decoding = ({name: make_drafters()[name] for name in names} for _ in range(2))
    for i, (prompt, response) in enumerate(texts):
        answers = Answers(model, params, prompt, response, nodes=1)
        assert [row[0] for row in answers.along] == response
        calls = count_calls(model, params, counting, i, prompt, response, 8)
        for name in names:
            out = generate(model, params, [prompt], max_new_tokens=40, drafter=decoding[name], width=8, adapt=False)
            assert out[0].tokens.tolist() == response
            assert calls[name] == out.stats.steps


def test_measure_gives_tokens_per_call(decoded):
    model, params, texts = decoded
    requests = [{"prompt": prompt, "response": response} for prompt, response in texts]
    drafters = {name: drafter for name, drafter in make_drafters().items() if name != "all"}
    table = measure(model, params, requests, [response for _, response in texts], 8, drafters)
    assert table.keys() == drafters.keys()
    # The warm responses are the ones asked for.
    assert table["shared alone"] > 3 > table["prompt lookup"] >= 1
