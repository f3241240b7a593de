from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlookahead.decoding import generate
from jaxlookahead.drafters.draft_model import DraftModel
from jaxlookahead.models.dummy import tiny_decoder
from jaxlookahead.results import first_difference
from jaxlookahead.sampling import Sampling

V = 50
PROMPTS = [np.random.default_rng(n).integers(0, V, n).tolist() for n in (1, 5, 40, 17, 80, 3)]
MIXED = [
    Sampling(temperature=0.7, top_p=0.9, seed=1),
    Sampling(temperature=1.0, repetition_penalty=1.3, no_repeat_ngram=3, seed=2),
    Sampling(),
    Sampling(temperature=1.2, logit_bias={3: 2.0}, banned_tokens=(7,), seed=3),
    Sampling(temperature=1.0, num_samples=2, seed=4),
    Sampling(temperature=0.9, seed=5),
]
OPTIONS = dict(max_new_tokens=24, adapt=False, width=4)


@pytest.fixture(scope="module")
def other():
    """A draft model that disagrees with `tiny`."""
    return tiny_decoder(seed=1, vocab_size=V)


@pytest.fixture(scope="module")
def near(tiny):
    """A draft model that often agrees with `tiny`: the same with disturbed parameters."""
    model, params = tiny
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    disturbed = [x + 0.03 * jnp.std(x) * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return model, jax.tree.unflatten(tree, disturbed)


@pytest.fixture(scope="module")
def plain(tiny):
    return generate(*tiny, PROMPTS, sampling=MIXED, drafter=None, **OPTIONS)


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        difference = first_difference(x, y)
        assert difference is None or difference.margin < 1e-4, (x.request, difference)


@pytest.mark.parametrize(("mode", "rows"), [("coupled", 1), ("coupled", 3), ("greedy", 3)])
def test_output_is_that_of_plain_decoding(tiny, near, plain, mode, rows):
    drafter = DraftModel(*near, depth=3, mode=mode)
    drafted = generate(*tiny, PROMPTS, sampling=MIXED, drafter=drafter, rows=rows, **OPTIONS)
    assert_same(plain, drafted)
    assert drafted.stats.accepted > 0


def test_a_draft_model_that_disagrees(tiny, other, plain):
    drafter = DraftModel(*other, depth=3, children=2)
    assert_same(plain, generate(*tiny, PROMPTS, sampling=MIXED, drafter=drafter, rows=3, **OPTIONS))


@pytest.mark.parametrize("sampling", [None, MIXED])
def test_D10_D17_the_model_itself_is_always_right(tiny, sampling):
    """Every draft token equals sequential decoding, after any number of accepted and rejected ones."""
    drafter = DraftModel(*tiny, depth=3)
    drafted = generate(*tiny, PROMPTS, sampling=sampling, drafter=drafter, rows=3, **OPTIONS)
    assert drafted.stats.acceptance_rate > 0.98  # a near-tie may fall otherwise
    assert drafted.stats.tokens_per_call > 3


def test_D10_D17_rejected_drafts_leave_no_trace(tiny, other):
    """After each of many rejections the draft equals that of a new drafter that reads the whole text."""
    used = DraftModel(*other, depth=3, children=2)
    rng = np.random.default_rng(0)
    used.begin("a", PROMPTS[1])
    used.begin("b", PROMPTS[4])
    text = list(PROMPTS[1])
    for _ in range(6):
        draft = used.draft("a", 6, 9)
        new = [*draft.tokens[: rng.integers(0, 3)], int(rng.integers(0, V))]
        used.extend("a", new)
        text += new
        fresh = DraftModel(*other, depth=3, children=2)
        fresh.begin("x", text)
        assert used.draft("a", 6, 9) == fresh.draft("x", 6, 9)
        used.draft("b", 6, 9)


def test_draft_equals_a_loop_over_the_model(other):
    model, params = other
    drafter = DraftModel(model, params, depth=3, children=2)
    drafter.begin(0, PROMPTS[3])
    draft = drafter.draft(0, 6, 9)
    text, chain, seconds = list(PROMPTS[3]), [], []
    for _ in range(3):
        size = len(text)
        mask = np.tril(np.ones((1, size, size), bool))
        logits, _ = model.forward(
            params, np.array([text], np.int32), np.arange(size)[None], mask, model.init_cache(1, size), jnp.int32(0)
        )
        best, second = np.argsort(-np.asarray(logits[0, -1]))[:2].tolist()
        chain.append(best)
        seconds.append(second)
        text.append(best)
    assert draft.tokens == chain + seconds
    assert draft.parents == [-1, 0, 1, -1, 0, 1]
    assert drafter.draft(0, 4, 9).tokens == [*chain, seconds[0]]
    assert drafter.draft(0, 6, 2).parents == [-1, 0, -1, 0]
    assert len(drafter.draft(0, 6, 0)) == 0


def test_A36_draft_model_with_a_shorter_context(tiny, plain):
    short = tiny_decoder(vocab_size=V, max_length=36)
    drafter = DraftModel(*short, depth=3)
    drafted = generate(*tiny, PROMPTS, sampling=MIXED, drafter=drafter, rows=3, **OPTIONS)
    assert_same(plain, drafted)
    for output in drafted:
        late = len(PROMPTS[output.request]) + np.arange(len(output.tokens)) >= 36
        assert not output.from_draft[late].any()
        assert late.all() or output.from_draft.any()


@pytest.mark.parametrize("size", [30, 60])
def test_D16_other_vocabulary(tiny, plain, size):
    drafter = DraftModel(*tiny_decoder(vocab_size=size), depth=3, children=2)
    assert_same(plain, generate(*tiny, PROMPTS, sampling=MIXED, drafter=drafter, rows=3, **OPTIONS))


def test_D16_rejection_needs_the_same_vocabulary(tiny):
    drafter = DraftModel(*tiny_decoder(vocab_size=60), mode="rejection")
    with pytest.raises(ValueError, match=r"60 token ids and the model 50.*mode='coupled'"):
        generate(*tiny, [[1]], sampling=Sampling(temperature=1.0), drafter=drafter)


def test_rejection_keeps_greedy_rows_and_is_repeatable(tiny, near, plain):
    def run(rows, depth=3):
        drafter = DraftModel(*near, depth=depth, children=2, mode="rejection")
        return generate(*tiny, PROMPTS, sampling=MIXED, drafter=drafter, rows=rows, **OPTIONS)

    first, second = run(3), run(3)
    assert first.tokens == second.tokens and first.stats.accepted > 0
    assert first.tokens[2] == plain.tokens[2]
    assert first.tokens != plain.tokens
    assert np.isnan(first[0].margins).all() and np.isfinite(first[2].margins).all()
    assert 7 not in first.tokens[3]
    # Without sampling settings there is nothing to reject by chance.
    greedy = generate(*tiny, PROMPTS, drafter=DraftModel(*near, mode="rejection"), **OPTIONS)
    assert_same(generate(*tiny, PROMPTS, drafter=None, **OPTIONS), greedy)


def test_rejection_with_the_model_itself_accepts_all(tiny):
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=1)
    drafter = DraftModel(*tiny, depth=3, mode="rejection")
    stats = generate(*tiny, PROMPTS, sampling=sampling, drafter=drafter, rows=3, **OPTIONS).stats
    assert stats.acceptance_rate > 0.98


@pytest.mark.parametrize(("children", "lenience"), [(1, 1.0), (2, 1.0), (1, 0.4)])
def test_B2_B3_B7_law_of_rejection(children, lenience):
    """The first two tokens follow the target's distribution; with lenience they do not."""
    size, draws = 8, 8192
    target, draft = (tiny_decoder(seed=seed, vocab_size=size) for seed in (0, 1))
    sampling = Sampling(temperature=5.0, top_k=6, seed=7, num_samples=draws)
    drafter = DraftModel(*draft, depth=2, children=children, mode="rejection", lenience=lenience)
    options = dict(sampling=sampling, max_new_tokens=2, rows=512, width=8, adapt=False)
    drafted = generate(*target, [[3]], drafter=drafter, **options)
    assert drafted.stats.accepted > 0.2 * draws

    model, params = target
    p = np.zeros((size, size))
    first = _law(model, params, [3], sampling)
    for token in range(size):
        p[token] = first[token] * _law(model, params, [3, token], sampling)
    counts = np.zeros((size, size))
    for tokens in drafted.tokens:
        counts[tokens[0], tokens[1]] += 1
    assert counts[p == 0].sum() == 0
    want, counts = p[p > 0] * draws, counts[p > 0]
    large = want >= 5
    statistic = ((counts - want)[large] ** 2 / want[large]).sum()
    degrees = large.sum() - 1
    deviation = (statistic - degrees) / np.sqrt(2 * degrees)
    assert deviation < 5 if lenience == 1 else deviation > 10


def _law(model, params, text, sampling):
    """The distribution of the token after `text`, temperature and top-k applied."""
    size = len(text)
    logits, _ = model.forward(
        params,
        np.array([text], np.int32),
        np.arange(size)[None],
        np.tril(np.ones((1, size, size), bool)),
        model.init_cache(1, size),
        jnp.int32(0),
    )
    logits = np.asarray(logits[0, -1], np.float64) / sampling.temperature
    logits[logits < np.sort(logits)[-sampling.top_k]] = -np.inf
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(depth=0), "depth must be an integer of at least 1, got 0"),
        (dict(children=1.5), "children must be an integer"),
        (dict(mode="sampled"), "mode='sampled' must be one of greedy, coupled, rejection"),
        (dict(mode="rejection", lenience=0), r"lenience must be in \(0, 1\]"),
        (dict(lenience=0.5), "lenience=0.5 has no meaning with mode='coupled'"),
    ],
)
def test_bad_arguments(tiny, options, words):
    with pytest.raises(ValueError, match=words):
        DraftModel(*tiny, **options)
