from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlookahead import decoding, on_device
from jaxlookahead.drafters.trie import TrieDrafter
from jaxlookahead.sampling import Sampling, pack


def padded(prompts):
    out = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in zip(out, prompts, strict=True):
        row[: len(prompt)] = prompt
    return out, np.array([len(prompt) for prompt in prompts], np.int32)


def run(tiny, prompts, **options):
    model, params = tiny
    tokens, lengths = padded(prompts)
    static = {key: options.pop(key) for key in ("max_new_tokens", "width", "max_ngram") if key in options}
    call = jax.jit(functools.partial(on_device.generate, model, **static))
    return call(params, tokens, lengths, **options)


def responses(result):
    return [row[:count].tolist() for row, count in zip(result.tokens, result.counts, strict=True)]


@pytest.mark.parametrize("width", [1, 8])
def test_same_tokens_as_generate(tiny, prompts, width):
    plain = decoding.generate(*tiny, prompts, drafter=None, max_new_tokens=40, eos_ids=[7, 20])
    result = run(tiny, prompts, max_new_tokens=40, width=width, eos_ids=jnp.array([7, 20]))
    assert responses(result) == plain.tokens
    assert [{1: "eos", 3: "length"}[int(x)] for x in result.finish] == [x.finish_reason for x in plain]
    assert (np.asarray(result.from_draft).any() and int(result.steps) < 40) == (width > 1)
    np.testing.assert_array_equal(np.asarray(result.tokens) == -1, np.arange(40) >= np.asarray(result.counts)[:, None])


def test_sampled_same_tokens_as_generate(tiny, prompts):
    samplings = [Sampling(temperature=1.0, seed=3), Sampling(), Sampling(temperature=0.7, top_p=0.9)] * 2
    plain = decoding.generate(*tiny, prompts, drafter=None, max_new_tokens=24, sampling=samplings)
    settings = pack(samplings, requests=range(6), vocab_size=50)
    result = run(tiny, prompts, max_new_tokens=24, width=4, settings=settings)
    assert responses(result) == plain.tokens
    for row, output in enumerate(plain):
        np.testing.assert_allclose(result.scores["logprob"][row], output.scores["logprob"], atol=1e-3)


def test_limits_for_each_row(tiny, prompts):
    plain = decoding.generate(*tiny, prompts, drafter=None, max_new_tokens=[3, 0, 5, 8, 1, 2])
    result = run(tiny, prompts, max_new_tokens=8, remaining=jnp.array([3, 0, 5, 8, 1, 2]))
    assert responses(result) == plain.tokens


def test_a_trie_makes_it_faster(tiny, prompts):
    cold = run(tiny, prompts[:2], max_new_tokens=30)
    memory = TrieDrafter()
    for prompt, response in zip(prompts[:2], responses(cold), strict=True):
        memory.insert([*prompt, *response])
    warm = run(tiny, prompts[:2], max_new_tokens=30, trie=memory.snapshot())
    assert responses(warm) == responses(cold) and int(warm.steps) < int(cold.steps)
    # Text of another vocabulary: the ids that the model lacks are never drafted.
    for prompt, response in zip(prompts[:2], responses(cold), strict=True):
        for i in range(1, 30):
            memory.insert([*prompt, *response[:i], 50 + i, 60])
    mixed = run(tiny, prompts[:2], max_new_tokens=30, trie=memory.snapshot())
    assert responses(mixed) == responses(cold)


@pytest.mark.parametrize(
    ("text", "ngram", "draft"),
    [
        ([1, 2, 3, 1, 2], 3, [3, 1, 2, 3]),  # A25: the copy goes on into the text it makes
        ([1, 2, 9, 1, 2, 8, 1, 2], 3, [8, 1, 2, 8]),  # A26: the latest
        ([5, 1, 2, 9, 6, 1, 8, 5, 1], 3, [2, 9, 6, 1]),  # the longest before the latest
        ([5, 1, 2, 9, 6, 1, 8, 5, 1], 1, [8, 5, 1, 8]),
        ([1, 2, 3], 3, []),
        ([0, 0], 2, [0, 0, 0, 0]),  # F1
        ([7], 3, []),
    ],
)
def test_lookup(text, ngram, draft):
    history, lengths = padded([text, [0] * 12])
    tree = on_device.lookup(jnp.asarray(history), jnp.asarray(lengths), width=5, max_ngram=ngram)
    kept = [int(t) for t, p in zip(tree.tokens[0, 1:], tree.parents[0, 1:], strict=True) if p >= 0]
    assert (int(tree.tokens[0, 0]), kept) == (text[-1], draft)


def test_lookup_stays_in_one_document():
    """A28, F5."""
    memory = TrieDrafter()
    memory.insert([1, 2, 3])
    memory.insert([4, 5])
    tree = on_device.lookup(jnp.array([[9, 2]]), jnp.array([2]), width=5, trie=memory.snapshot())
    assert tree.parents[0].tolist() == [-1, 0, -1, -1, -1] and int(tree.tokens[0, 1]) == 3


def test_too_long(tiny):
    with pytest.raises(ValueError, match="pass the model's 512 positions"):
        run(tiny, [[1] * 500], max_new_tokens=20)
