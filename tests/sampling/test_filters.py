import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlookahead.sampling import Sampling

from .helpers import V, processed, reference_filters, softmax

_logit = st.one_of(
    st.floats(-30, 30, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0),
    st.integers(-4, 4).map(float),  # ties
    st.just(-np.inf),
    # Nearly equal, but not so small that the device takes them for 0.
    st.floats(-(2**-20), 2**-20, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0),
)


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(_logit, min_size=V, max_size=V).filter(lambda x: max(x) > -np.inf),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 2, 5, V - 1, V, V + 9]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_kept_set_equals_that_of_a_sort(logits, temperature, top_k, top_p, min_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = processed(sampling, [1], [], logits)
    want, sure = reference_filters(sampling, logits)
    np.testing.assert_array_equal((got > -np.inf)[sure], (want > -np.inf)[sure])
    kept = got > -np.inf
    assert kept[np.argmax(logits)]
    np.testing.assert_allclose(got[kept], np.float32(logits)[kept] / np.float32(temperature), rtol=1e-6)


def test_kept_set_at_a_real_vocabulary_size():
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=20_000) * 3).astype(np.float32)
    for options in ({"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 500, "top_p": 0.5}):
        sampling = Sampling(temperature=0.8, **options)
        want, sure = reference_filters(sampling, logits)
        got = processed(sampling, [1], [], logits)
        assert sure.all()
        np.testing.assert_array_equal(got > -np.inf, want > -np.inf)


def test_B10_temperature_comes_before_top_p():
    got = softmax(processed(Sampling(temperature=2.0, top_p=0.6), [1], [], [2.0, 1.0, 0.0, -1.0]))
    np.testing.assert_allclose(got, [0.6225, 0.3775, 0, 0], atol=1e-4)


def test_B14_processed_logits_are_logits_not_probabilities():
    logits = np.linspace(-3, 3, V)
    np.testing.assert_allclose(
        softmax(processed(Sampling(temperature=0.7), [1], [], logits)), softmax(logits / 0.7), rtol=1e-5
    )


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}])
def test_greedy_rows_are_not_filtered(options):
    logits = np.linspace(-3, 3, V).astype(np.float32)
    np.testing.assert_array_equal(processed(Sampling(**options), [1], [], logits), logits)


def test_ties_at_the_boundary_stay_together():
    logits = [3.0, 2.0, 2.0, 2.0, 1.0, 0.0]
    assert (processed(Sampling(temperature=1.0, top_k=2), [1], [], logits) > -np.inf).sum() == 4
    assert (processed(Sampling(temperature=1.0, top_p=0.5), [1], [], logits) > -np.inf).sum() == 4
