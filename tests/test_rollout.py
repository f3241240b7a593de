from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxlookahead import engine
from jaxlookahead.drafters.trie import TrieDrafter
from jaxlookahead.rollout import rollout
from jaxlookahead.sampling import Sampling
from jaxlookahead.step import prefill

PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [3]]


def test_shapes_and_log_probabilities(tiny):
    """B20: log-probabilities are those of one forward pass over prompt and response."""
    model, params = tiny
    sampling = Sampling(temperature=2.0, seed=4)
    result = rollout(model, params, PROMPTS, 4, max_new_tokens=12, sampling=sampling, eos_ids=[7], pad_id=49, rows=3)
    assert result.tokens.shape == result.mask.shape == result.logprobs.shape == (12, result.tokens.shape[1])
    assert result.prompts.shape == (12, 6) and result.prompt_mask.sum() == 4 * (3 + 6 + 1)
    assert result.sequences.shape == (12, 6 + result.tokens.shape[1])
    assert (result.tokens[~result.mask] == 49).all() and (result.logprobs[~result.mask] == 0).all()
    assert len({tuple(row) for row in result.tokens[:4].tolist()}) > 1
    for row in range(12):
        prompt, response = PROMPTS[row // 4], result.tokens[row][result.mask[row]]
        assert result.prompts[row][result.prompt_mask[row]].tolist() == prompt
        assert result.finish_reasons[row] == ("eos" if response[-1] == 7 else "length")
        text = np.zeros((1, 24), np.int32)
        text[0, : len(prompt) + len(response)] = [*prompt, *response]
        logits = np.asarray(prefill(model, params, model.init_cache(1, 24), text, 0)[0][0])
        at = np.arange(len(response)) + len(prompt) - 1
        for name, temperature in (("logprobs_raw", 1.0), ("logprobs", 2.0)):
            wanted = jax.nn.log_softmax(logits[at] / temperature)[np.arange(len(response)), response]
            np.testing.assert_allclose(getattr(result, name)[row][result.mask[row]], wanted, atol=1e-3)


def test_same_tokens_drafted_or_not_and_over_weight_updates(tiny):
    model, params = tiny
    drafter = TrieDrafter()
    options = dict(max_new_tokens=16, rows=3)
    engine.TRACES.clear()
    for epoch in range(3):
        updated = jax.tree.map(lambda x, epoch=epoch: x * (1 + 0.01 * epoch), params)
        sampling = Sampling(temperature=0.5, seed=epoch)
        plain = rollout(model, updated, PROMPTS, 4, drafter=None, sampling=sampling, **options)
        drafted = rollout(model, updated, PROMPTS, 4, drafter=drafter, sampling=sampling, **options)
        np.testing.assert_array_equal(plain.tokens, drafted.tokens)
    # New weights compile nothing.
    assert max(engine.TRACES.values(), default=0) <= 1


def test_prompts_are_prefilled_once(tiny, monkeypatch):
    model, params = tiny
    calls = []
    original = engine.Engine._prefill
    monkeypatch.setattr(
        engine.Engine, "_prefill", lambda self, sizes, prompts: calls.extend(prompts) or original(self, sizes, prompts)
    )
    rollout(model, params, PROMPTS, 6, max_new_tokens=4, rows=2)
    assert sorted(calls) == sorted({tuple(prompt[:-1]) for prompt in PROMPTS if len(prompt) > 1})


def test_no_samples(tiny):
    with pytest.raises(ValueError, match="n must be at least 1"):
        rollout(*tiny, PROMPTS, 0)
