import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlookahead.sampling import Sampling, advance, decide, init_context, process

from .helpers import EOS, L, V, padded, processed, reference_processors, rows, run_process

_token = st.integers(0, 5)  # few tokens, so that n-grams repeat


@st.composite
def _sampling(draw):
    return Sampling(
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -2.0])),
        logit_bias=draw(st.dictionaries(st.integers(0, V - 1), st.sampled_from([1.5, -2.0, -np.inf]), max_size=5)),
        banned_tokens=tuple(draw(st.lists(_token, max_size=2))),
        banned_sequences=tuple(draw(st.lists(st.lists(_token, min_size=1, max_size=4).map(tuple), max_size=3))),
        no_repeat_ngram=draw(st.integers(0, 5)),
        min_new_tokens=draw(st.integers(0, 6)),
        forced_tokens=draw(st.dictionaries(st.integers(0, 8), _token, max_size=3)),
    )


@settings(max_examples=150, deadline=None)
@given(
    batch=st.lists(
        st.tuples(_sampling(), st.lists(_token, min_size=1, max_size=8), st.lists(_token, max_size=8)),
        min_size=3,
        max_size=3,
    ),
    seed=st.integers(0, 100),
)
def test_processors_equal_their_definitions(batch, seed):
    logits = np.random.default_rng(seed).normal(size=(3, V)).astype(np.float32)
    got = run_process(
        rows([sampling for sampling, _, _ in batch]),
        padded([[*prompt, *output] for _, prompt, output in batch]),
        np.array([len(prompt) for _, prompt, _ in batch]),
        np.array([len(prompt) + len(output) for _, prompt, output in batch]),
        logits,
    )
    for row, (sampling, prompt, output) in enumerate(batch):
        want = reference_processors(sampling, prompt, output, logits[row])
        np.testing.assert_allclose(got[row], want, rtol=1e-5, atol=1e-5)


_MIXED = [
    Sampling(),
    Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.3, seed=4),
    Sampling(frequency_penalty=2.0, presence_penalty=-1.0, no_repeat_ngram=3),
    Sampling(temperature=1.2, banned_sequences=((1, 2), (3, 4, 5)), min_new_tokens=4, forced_tokens={2: 9}),
]


def test_B24_penalties_see_the_tokens_above_the_node():
    arrays = rows(_MIXED)
    rng = np.random.default_rng(1)
    history = padded([rng.integers(0, V, 4).tolist() for _ in _MIXED])
    prompt_length = np.full(4, 4)
    step = jax.jit(lambda *args: (decide(*args), process(*args)))
    push = jax.jit(advance)
    context = init_context(arrays, history, prompt_length, prompt_length)
    for _ in range(10):
        logits = rng.normal(size=(4, V)).astype(np.float32) * 3
        decision, now = step(arrays, context, logits)
        rebuilt = run_process(arrays, context.history, prompt_length, context.length, logits)
        np.testing.assert_allclose(now, rebuilt, rtol=1e-6)
        context = push(context, decision.token, jnp.ones(4, bool))
    assert context.position.tolist() == [10] * 4


def test_advance_leaves_inactive_rows():
    arrays = rows([Sampling(repetition_penalty=2.0)] * 2)
    context = init_context(arrays, padded([[1, 2], [1, 2]]), np.array([2, 2]), np.array([2, 2]))
    after = advance(context, jnp.array([5, 5]), jnp.array([True, False]))
    assert after.length.tolist() == [3, 2]
    assert after.counts[:, 5].tolist() == [1, 0]
    assert after.history[:, 2].tolist() == [5, 7]


def test_B22_banned_token_is_removed_at_every_position():
    sampling = Sampling(logit_bias={3: -np.inf}, temperature=1.0)
    logits = np.zeros(V, np.float32)
    logits[3] = 20
    for depth in range(8):
        assert processed(sampling, [3], [3] * depth, logits)[3] == -np.inf


@pytest.mark.parametrize("penalty", [2.0, -2.0])
def test_B23_frequency_penalty_counts_output_tokens(penalty):
    got = processed(Sampling(frequency_penalty=penalty), [4, 4, 4], [5, 6, 5], np.zeros(V))
    want = np.zeros(V)
    want[[5, 6]] = [-2 * penalty, -penalty]
    np.testing.assert_array_equal(got, want)


def test_C7_eos_is_banned_only_before_the_minimum():
    sampling = Sampling(min_new_tokens=2)
    logits = np.zeros(V, np.float32)
    logits[EOS] = 5
    assert [processed(sampling, [1], [4] * n, logits)[EOS] for n in range(4)] == [-np.inf, -np.inf, 5, 5]
    assert processed(Sampling(), [1], [], logits)[EOS] == 5


def test_forced_token_wins_over_bans():
    got = processed(Sampling(forced_tokens={1: 6}, banned_tokens=(6,)), [1], [4], np.zeros(V))
    assert got[6] == 0
    assert (got == -np.inf).sum() == V - 1


def test_users_processor_sees_the_history_and_runs_before_temperature():
    def no_immediate_repeat(history, length, logits):
        newest = jnp.take_along_axis(history, length[:, None] - 1, axis=1)
        return jnp.where(jnp.arange(logits.shape[1]) == newest, -jnp.inf, logits)

    logits = np.arange(V, dtype=np.float32)
    sampling = Sampling(temperature=2.0, forced_tokens={5: 3})
    got = processed(sampling, [1], [8], logits, processors=(no_immediate_repeat,))
    np.testing.assert_array_equal(got, np.where(np.arange(V) == 8, -np.inf, logits / 2))


def test_users_processor_must_keep_the_shape():
    with pytest.raises(ValueError, match=r"returned shape \(1, 23\), it must return \(1, 24\)"):
        processed(Sampling(), [1], [], np.zeros(V), processors=(lambda history, length, logits: logits[:, 1:],))


def test_wrong_vocabulary_is_refused():
    arrays = rows([Sampling()])
    with pytest.raises(ValueError, match=r"logits: shape \(1, 30\)"):
        run_process(arrays, padded([[1]]), np.array([1]), np.array([1]), np.zeros((1, 30), np.float32))


def test_no_setting_recompiles():
    compiled = jax.jit(lambda arrays, *rest: process(arrays, init_context(arrays, *rest[:3]), rest[3]))
    for samplings in ([Sampling()] * 4, _MIXED, _MIXED[::-1]):
        lengths = np.full(4, 3, np.int32), np.full(4, 5, np.int32)
        compiled(rows(samplings), np.zeros((4, L), np.int32), *lengths, np.zeros((4, V), np.float32))
    assert compiled._cache_size() == 1


def test_processors_keep_the_callers_logits():
    logits = np.ones((1, V), np.float32)
    arrays = rows([Sampling(temperature=0.5, top_k=3, repetition_penalty=1.5)])
    device = jnp.asarray(logits)
    run_process(arrays, padded([[1]]), np.array([1]), np.array([1]), device)
    np.testing.assert_array_equal(device, logits)
