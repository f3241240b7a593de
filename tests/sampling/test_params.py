import copy
import dataclasses
import pickle

import jax
import numpy as np
import pytest

from jaxlookahead.sampling import Sampling, pack

FULL = Sampling(
    temperature=0.7,
    top_k=5,
    logit_bias={4: 1.5, 1: -np.inf},
    banned_tokens=[3, np.int64(9)],
    banned_sequences=[[1, 2], (5,)],
    forced_tokens={0: 8},
    seed=2**63,
)


def test_F8_options_can_be_used_again_and_never_change():
    before = copy.deepcopy(FULL)
    first = pack([FULL, FULL], requests=[0, 1], vocab_size=16)
    second = pack([FULL, FULL], requests=[0, 1], vocab_size=16)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert before == FULL
    assert hash(before) == hash(FULL)
    assert pickle.loads(pickle.dumps(FULL)) == FULL
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.top_k = 3
    with pytest.raises(TypeError):
        FULL.logit_bias[4] = 0.0


def test_the_caller_keeps_the_mapping():
    bias = {3: 1.0}
    sampling = Sampling(logit_bias=bias)
    bias[3] = 2.0
    assert sampling.logit_bias == {3: 1.0}
    assert dataclasses.replace(sampling, seed=1).logit_bias == {3: 1.0}


def test_F10_unknown_option_is_named():
    with pytest.raises(TypeError, match="top_q"):
        Sampling(top_q=0.5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", 1e-9),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", float("inf")),
        ("logit_bias", [(1, 2.0)]),
        ("logit_bias", {-1: 2.0}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: float("inf")}),
        ("banned_tokens", (-1,)),
        ("banned_tokens", "abc"),
        ("banned_tokens", 5),
        ("banned_sequences", ((),)),
        ("banned_sequences", ((1, -2),)),
        ("no_repeat_ngram", -1),
        ("min_new_tokens", -1),
        ("forced_tokens", {-1: 2}),
        ("forced_tokens", {1: -2}),
        ("seed", -1),
        ("seed", 2**64),
        ("num_samples", 0),
    ],
)
def test_bad_value_is_named_with_a_remedy(field, value):
    with pytest.raises(ValueError, match=rf"Sampling\.{field} = .+: .+"):
        Sampling(**{field: value})
