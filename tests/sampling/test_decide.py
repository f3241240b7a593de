import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlookahead.sampling import (
    Sampling,
    decide,
    decide_greedy,
    init_context,
    is_plain,
    process,
    top_logprobs,
)

from .helpers import L, V, padded, rows, run_decide, run_process, softmax


def _decide(samplings, logits, output=(), requests=None, **kwargs):
    histories = padded([[1, *output]] * len(samplings))
    lengths = np.full(len(samplings), 1), np.full(len(samplings), 1 + len(output))
    arrays = rows(samplings, requests, vocab_size=len(logits[0]))
    return run_decide(arrays, histories, *lengths, np.asarray(logits, np.float32), **kwargs)


@pytest.fixture(scope="module")
def draws():
    """Tokens that one row of settings chooses at many positions: `[count]`."""

    def draw(sampling, logits, count=200_000, block=2000):
        arrays = rows([sampling] * block, requests=[3] * block, vocab_size=len(logits))
        logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (block, len(logits)))

        @jax.jit
        def one(first):
            length = 1 + first + jnp.arange(block)
            context = init_context(arrays, jnp.zeros((block, L), jnp.int32), jnp.ones(block, jnp.int32), length)
            return decide(arrays, context, logits).token

        return np.asarray(jax.lax.map(one, jnp.arange(0, count, block))).reshape(-1)

    return draw


def chi_square(tokens, p):
    """Standardised chi-square statistic of `tokens` against `p`; tokens of probability 0 must not occur."""
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[p == 0].sum() == 0
    used = p > 0
    want = p[used] * len(tokens)
    freedom = used.sum() - 1
    return (((counts[used] - want) ** 2 / want).sum() - freedom) / (2 * freedom) ** 0.5


LOGITS = np.array([1.0, 0.0, 3.0, -1.0, 2.5, -np.inf, 0.5, -4.0])


@pytest.mark.parametrize(
    "options",
    [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"temperature": 0.5, "logit_bias": {3: 2.0}}],
)
def test_B32_B2_sampled_tokens_follow_the_processed_distribution(draws, options):
    sampling = Sampling(**{"temperature": 1.0, "seed": 11, **options})
    arrays = rows([sampling], vocab_size=8)
    p = softmax(run_process(arrays, padded([[1]]), np.array([1]), np.array([1]), LOGITS[None].astype(np.float32)))
    assert chi_square(draws(sampling, LOGITS), p[0]) < 5


def test_B9_greedy_row_in_a_batch_with_sampled_ones():
    logits = [[5.0, 1.0, 0.0, -3.0]] * 2
    for t in range(30):
        got = _decide([Sampling(), Sampling(temperature=1.0)], logits, output=[0] * (t % 15), requests=[t, t + 1])
        assert got.token[0] == 0
        assert got.margin[0] == 4


def test_B11_F6_top_k_1_equals_greedy():
    logits = np.random.default_rng(0).normal(size=(64, V)).astype(np.float32)
    sampled = _decide([Sampling(temperature=1.0 if row % 2 else 0.05, top_k=1, seed=row) for row in range(64)], logits)
    np.testing.assert_array_equal(sampled.token, logits.argmax(-1))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.5)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_B17_bad_logits_are_flagged_and_the_token_is_in_the_vocabulary(sampling, value):
    for rowful in (False, True):
        logits = np.zeros((2, V), np.float32)
        logits[1, 3:] = value
        logits[1, : 3 if rowful else 0] = value
        got = _decide([sampling] * 2, logits)
        assert got.bad.tolist() == [False, True]
        assert (np.asarray(got.token) >= 0).all()
        assert (np.asarray(got.token) < V).all()
        assert got.margin[1] == 0
        greedy = decide_greedy(jnp.asarray(logits))
        assert greedy.bad.tolist() == [False, True]
        assert 0 <= greedy.token[1] < V


def test_nothing_left_is_flagged():
    got = _decide([Sampling(banned_tokens=tuple(range(V))), Sampling()], np.zeros((2, V)))
    assert got.bad.tolist() == [True, False]
    assert 0 <= got.token[0] < V


def test_B20_logprobs_are_those_of_the_raw_and_the_processed_distribution():
    logits = np.random.default_rng(2).normal(size=(3, V)).astype(np.float32) * 2
    samplings = [Sampling(), Sampling(temperature=0.5, top_k=4, seed=1), Sampling(repetition_penalty=1.5)]
    arrays, histories = rows(samplings), padded([[1, 4, 4]] * 3)
    lengths = np.full(3, 1), np.full(3, 3)
    got = run_decide(arrays, histories, *lengths, logits)
    final = np.asarray(run_process(arrays, histories, *lengths, logits))
    for row in range(3):
        token = int(got.token[row])
        np.testing.assert_allclose(got.scores["logprob_raw"][row], np.log(softmax(logits[row])[token]), atol=1e-5)
        np.testing.assert_allclose(got.scores["logprob"][row], np.log(softmax(final[row])[token]), atol=1e-5)


def test_B25_B26_B35_seeded_row_does_not_depend_on_the_batch():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(4, V)).astype(np.float32)
    samplings = [
        Sampling(temperature=1.0, seed=42),
        Sampling(temperature=0.7, seed=1, top_p=0.9),
        Sampling(),
        Sampling(temperature=1.5, seed=9, repetition_penalty=1.2),
    ]
    together = _decide(samplings, logits, output=[3, 5], requests=[10, 11, 12, 13])
    again = _decide(samplings, logits, output=[3, 5], requests=[10, 11, 12, 13])
    jax.tree.map(np.testing.assert_array_equal, together, again)
    order = [2, 0, 3, 1]
    shuffled = _decide([samplings[i] for i in order], logits[order], [3, 5], [10 + i for i in order])
    np.testing.assert_array_equal(shuffled.token, np.asarray(together.token)[order])
    for row in range(4):
        alone = _decide([samplings[row]], logits[row : row + 1], [3, 5], [10 + row])
        assert alone.token[0] == together.token[row]
        np.testing.assert_allclose(alone.scores["logprob"][0], together.scores["logprob"][row], atol=1e-6)
        np.testing.assert_allclose(alone.margin[0], together.margin[row], atol=1e-5)


def test_B29_every_likely_token_occurs():
    logits = np.full((300, V), -9.0, np.float32)
    logits[:, [4, 7, 11]] = [1.0, 1.2, 0.8]
    got = _decide([Sampling(temperature=1.0, seed=seed) for seed in range(300)], logits)
    assert {4, 7, 11} <= set(np.asarray(got.token).tolist())


def test_B30_low_temperature_takes_the_mode():
    logits = np.zeros((300, V), np.float32)
    logits[:, 5] = 1.0
    got = _decide([Sampling(temperature=0.1, seed=seed) for seed in range(300)], logits)
    p = softmax(logits[0] / 0.1)[5]
    assert (np.asarray(got.token) == 5).mean() > p - 3 * (p * (1 - p) / 300) ** 0.5


def test_samples_of_one_prompt_differ():
    got = _decide([Sampling(temperature=1.0)] * 64, np.zeros((64, V)), requests=range(64))
    assert len(set(np.asarray(got.token).tolist())) > V // 2


def test_margin_is_the_gap_of_what_was_compared():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(40, V)).astype(np.float32)
    greedy = decide_greedy(logits)
    ordered = np.sort(logits, -1)
    np.testing.assert_allclose(greedy.margin, ordered[:, -1] - ordered[:, -2], atol=1e-6)
    np.testing.assert_array_equal(greedy.token, logits.argmax(-1))
    assert decide_greedy(jnp.asarray(logits).reshape(4, 10, V)).token.shape == (4, 10)


@pytest.mark.parametrize("options", [{"top_p": 0.6}, {"top_k": 6}, {"min_p": 0.3}, {"top_k": 8, "top_p": 0.8}])
def test_margin_explains_every_change_that_small_errors_cause(options):
    """Errors of size e change a token only where the margin is of the order of e: filters count, too."""
    rng = np.random.default_rng(5)
    count, error = 4000, 1e-2
    logits = rng.normal(size=(count, V)).astype(np.float32)
    samplings = [Sampling(temperature=1.0, seed=seed, **options) for seed in range(count)]
    first = _decide(samplings, logits)
    second = _decide(samplings, logits + rng.uniform(-error, error, logits.shape).astype(np.float32))
    changed = np.asarray(first.token != second.token)
    margin = np.asarray(first.margin)
    assert changed.sum() > 3
    assert margin[changed].max() <= 4 * error
    # It still says that most tokens are safe.
    assert np.median(margin) > 10 * error


def test_plain_rows_are_those_that_need_nothing():
    samplings = [Sampling(), Sampling(top_k=3), Sampling(temperature=1.0), Sampling(banned_tokens=(1,))]
    samplings += [Sampling(min_new_tokens=1), Sampling(no_repeat_ngram=2), Sampling(forced_tokens={0: 1})]
    assert is_plain(rows(samplings)).tolist() == [True, True] + [False] * 5


def test_greedy_without_settings_equals_decide():
    logits = np.random.default_rng(6).normal(size=(3, V)).astype(np.float32)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        _decide([Sampling()] * 3, logits),
        decide_greedy(logits),
    )


def test_bfloat16_logits():
    logits = jnp.asarray(np.random.default_rng(7).normal(size=(2, V)), jnp.bfloat16)
    arrays = rows([Sampling(), Sampling(temperature=1.0, top_p=0.9)])
    context = init_context(arrays, padded([[1]] * 2), np.array([1, 1]), np.array([1, 1]))
    assert process(arrays, context, logits).dtype == jnp.float32
    assert decide(arrays, context, logits).token[0] == jnp.argmax(logits[0].astype(jnp.float32))


def test_top_logprobs():
    logits = np.array([[1.0, 3.0, 3.0, -9.0]])
    tokens, logprobs = top_logprobs(jnp.asarray(logits), 3)
    assert tokens.tolist() == [[1, 2, 0]]
    np.testing.assert_allclose(logprobs, np.log(softmax(logits))[:, [1, 2, 0]], rtol=1e-5)
