import jax
import numpy as np
import pytest

from jaxlookahead.sampling import Sampling, Sizes, pack

from .test_params import FULL


def test_pack_checks_the_vocabulary():
    for field in ({"logit_bias": {16: 1.0}}, {"banned_tokens": (16,)}, {"banned_sequences": ((1, 16),)}):
        with pytest.raises(ValueError, match=r"vocabulary size 16"):
            pack([Sampling(), Sampling(**field)], requests=[0, 1], vocab_size=16)
    with pytest.raises(ValueError, match=r"eos_ids = \[16\]"):
        pack([Sampling()], requests=[0], vocab_size=16, eos_ids=[16])
    with pytest.raises(ValueError, match="one id per row"):
        pack([Sampling()], requests=[0, 1], vocab_size=16)


def test_sizes_keep_shapes_the_same():
    many = Sampling(banned_tokens=tuple(range(9)), banned_sequences=(tuple(range(10)),) * 5)
    assert Sizes.of([many]) == Sizes(bias=16, sequences=8, sequence_length=16)
    assert Sizes.of([Sampling(), FULL]) == Sizes()
    shapes = [
        jax.tree.map(np.shape, pack(s, requests=[0, 1], vocab_size=16, sizes=Sizes.of([many])))
        for s in ([many, FULL], [Sampling(), Sampling()])
    ]
    assert shapes[0] == shapes[1]
    with pytest.raises(ValueError, match="can't hold"):
        pack([many], requests=[0], vocab_size=16, sizes=Sizes())


def test_seed_words():
    arrays = pack([FULL, Sampling(seed=2**32 + 5)], requests=[0, 1], vocab_size=16)
    assert arrays.seed.tolist() == [[0, 2**31], [5, 1]]
    assert arrays.top_p_tail[0] == 0
