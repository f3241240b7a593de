"""Options of `generate` that change how it decodes or what it tells, and no token."""

from __future__ import annotations

import numpy as np
import pytest

from jaxlookahead import decoding, engine
from jaxlookahead.decoding import generate
from jaxlookahead.drafters.protocol import Draft, DrafterBase
from jaxlookahead.drafters.trie import TrieDrafter
from jaxlookahead.results import BadLogitsError
from jaxlookahead.sampling import Sampling
from jaxlookahead.testing import OracleDrafter
from tests.models_that_fail import Breaks


@pytest.fixture(scope="module")
def plain(tiny, prompts):
    return generate(*tiny, prompts, drafter=None, max_new_tokens=60)


def oracle(prompts, outputs):
    return OracleDrafter({tuple(p): x.tokens for p, x in zip(prompts, outputs, strict=True)}, 50, error_rate=0.0)


class Sometimes(DrafterBase):
    """Has drafts at some four steps of twelve."""

    def __init__(self, inner, rows):
        self.inner, self.rows, self.calls = inner, rows, 0

    def begin(self, request, prompt, *, namespace=None):
        self.inner.begin(request, prompt, namespace=namespace)

    def extend(self, request, tokens):
        self.inner.extend(request, tokens)

    def draft(self, request, budget, max_depth):
        self.calls += 1
        return Draft() if self.calls // self.rows % 12 > 3 else self.inner.draft(request, budget, max_depth)

    def end(self, request, *, remember=True):
        self.inner.end(request, remember=remember)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("drafted", [False, True])
def test_several_plain_steps_in_one_call(tiny, prompts, plain, rows, drafted, monkeypatch):
    called = []

    class Counting(engine.Engine):
        def dispatch_plain(self, newest, steps):
            called.append(steps)
            return super().dispatch_plain(newest, steps)

    monkeypatch.setattr(decoding, "Engine", Counting)
    sampling = [Sampling(temperature=t, repetition_penalty=1.1) for t in (0, 1, 0, 1, 0, 1)]
    for options in (dict(eos_ids=[27], stop=[plain.tokens[4][5:8]]), dict(sampling=sampling)):
        common = dict(max_new_tokens=[60, 0, 7, 60, 31, 60], rows=rows, adapt=False, **options)
        one = generate(*tiny, prompts, drafter=None, plain_steps=1, **common)
        drafter = Sometimes(oracle(prompts, one), rows) if drafted else None
        assert not called
        many = generate(*tiny, prompts, drafter=drafter, plain_steps=4, width=8, **common)
        assert set(called) == {4}
        called.clear()
        assert one.tokens == many.tokens
        for a, b in zip(one, many, strict=True):
            assert a.finish_reason == b.finish_reason
            np.testing.assert_allclose(a.margins, b.margins, atol=1e-4)
            for name, values in a.scores.items():
                np.testing.assert_allclose(values, b.scores[name], atol=1e-4)
        if drafted:
            assert many.stats.row_steps < one.stats.row_steps
        else:
            assert many.stats.histogram == one.stats.histogram
            assert [x.stats.steps for x in many] == [x.stats.steps for x in one]


def test_plain_steps_stop_at_bad_logits(tiny):
    model, params = tiny
    with pytest.raises(BadLogitsError, match=r"prompts\[0\], token 4 of the response") as caught:
        generate(Breaks(model, 6), params, [[1, 2, 3]], drafter=None, plain_steps=8, max_new_tokens=10)
    assert len(caught.value.generation.tokens[0]) == 4
    # As many steps as one by one, the one that broke included.
    stats = caught.value.generation.stats
    assert (stats.steps, stats.row_steps, stats.histogram, stats.tokens) == (5, 5, [5], 4)


def test_width_of_each_request(tiny, prompts, plain):
    widths = [1, 8, 1, 8, 4, 1]
    drafted = generate(
        *tiny, prompts, drafter=oracle(prompts, plain), width=widths, adapt=False, rows=3, max_new_tokens=60
    )
    assert drafted.tokens == plain.tokens
    for width, output in zip(widths, drafted, strict=True):
        assert (output.stats.drafted == 0) == (width == 1)
        assert output.stats.drafted <= (width - 1) * output.stats.steps
    with pytest.raises(ValueError, match="width has 2 entries for 6 prompts"):
        generate(*tiny, prompts, width=[1, 2])


def test_top_logprobs(tiny, prompts):
    """The likeliest tokens at each place, and their log-probabilities, are those of plain decoding."""
    common = dict(max_new_tokens=20, logprobs=True, top_logprobs=3, rows=3, width=8, adapt=False)
    wanted = generate(*tiny, prompts[:3], drafter=None, **common)
    for output in wanted:
        assert output.scores["top_tokens"].shape == output.scores["top_logprobs"].shape == (20, 3)
        assert (output.scores["top_tokens"][:, 0] == output.tokens).all()
        np.testing.assert_allclose(output.scores["top_logprobs"][:, 0], output.scores["logprob_raw"], atol=1e-5)
        assert (np.diff(output.scores["top_logprobs"]) <= 0).all()
    drafters = (oracle(prompts, wanted[:] + wanted[:3]), TrieDrafter(successors=2), None)
    for drafter, steps in zip(drafters, (1, 1, 4), strict=True):
        got = generate(*tiny, prompts[:3], drafter=drafter, plain_steps=steps, **common)
        for a, b in zip(wanted, got, strict=True):
            assert (a.scores["top_tokens"] == b.scores["top_tokens"]).all()
            np.testing.assert_allclose(a.scores["top_logprobs"], b.scores["top_logprobs"], atol=1e-4)
    nothing = generate(*tiny, prompts[:1], drafter=None, **common | {"max_new_tokens": 0})[0].scores
    assert {name: (x.shape, x.dtype) for name, x in nothing.items()} == {
        name: ((0, *x.shape[1:]), x.dtype) for name, x in wanted[0].scores.items()
    }
    for wrong in (-1, 51, True):
        with pytest.raises((ValueError, TypeError), match="top_logprobs"):
            generate(*tiny, prompts, top_logprobs=wrong)


def test_progress_counts_requests_and_tokens(tiny, capsys):
    result = generate(*tiny, [[1, 2], [3]], max_new_tokens=5, progress=True)
    assert result.tokens == generate(*tiny, [[1, 2], [3]], max_new_tokens=5).tokens
    said = capsys.readouterr().out
    assert "2/2" in said and "10 tokens" in said


def test_cache_spec_without_a_mesh(tiny):
    with pytest.raises(ValueError, match=r"cache_spec.*one device"):
        generate(*tiny, [[1]], cache_spec="model")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"input_ids": [1, 2]}, r"prompts\[0\] .* got dict; pass its 'input_ids'"),
        (np.ones((1, 2), np.int32), r"got shape \(1, 2\); pass one row"),
    ],
)
def test_what_tokenizers_return(tiny, prompt, message):
    with pytest.raises((TypeError, ValueError), match=message):
        generate(*tiny, [prompt])


def test_arguments_of_another_kind(tiny):
    model, params = tiny
    with pytest.raises(TypeError, match="model is a dict without vocab_size"):
        generate(params, model, [[1]])

    class Bare:
        def begin(self, request, prompt, *, namespace=None): ...

    with pytest.raises(TypeError, match=r"lacks draft, extend, end, idle, verified of .*DrafterBase"):
        generate(model, params, [[1]], drafter=Bare())


def test_repr_of_a_response_is_short(tiny):
    assert "margins" not in repr(generate(*tiny, [[1]], max_new_tokens=1)[0])
