"""T5 on its golden checkpoints: logits, trees, drafts from the encoder's input, gradients."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlookahead import TrieDrafter, check_model, load
from jaxlookahead.encoder_decoder import WithInputs, generate
from jaxlookahead.models.t5 import T5Config, bucket
from jaxlookahead.results import BadLogitsError
from jaxlookahead.sampling.params import Sampling
from jaxlookahead.testing import AdversarialDrafter

from .conftest import causal, run

GOLDEN = Path(__file__).parents[1] / "golden" / "encoder_decoder"
NAMES = ("t5", "t5_gated")
INPUTS = [[5, 6, 7, 8, 9, 10, 1], [11, 12, 1], [3, 4, 3, 4, 3, 4, 20, 21, 22, 1]]


@functools.cache
def loaded(name: str):
    return load(GOLDEN / name, dtype="float32", tokenizer=None)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_reference_at_once_and_one_by_one(name):
    model, weights, _ = loaded(name)
    golden = np.load(GOLDEN / name / "golden.npz")
    params, tokens = model.with_inputs(weights, [golden["inputs"].tolist()]), golden["tokens"][None]
    count = tokens.shape[1]
    found, _ = run(model, params, tokens, [range(count)], causal(1, count, 32), model.init_cache(1, 32), 0)
    np.testing.assert_allclose(found[0], golden["logits"], atol=1e-4)
    cache = model.init_cache(1, 32)
    for t in range(count):
        one, cache = run(model, params, tokens[:, t : t + 1], [[t]], causal(1, 1, 32, t), cache, t)
        np.testing.assert_allclose(one[0, 0], golden["logits"][t], atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_F2_check_model(name):
    model, weights, _ = loaded(name)
    report = check_model(model, model.with_inputs(weights, INPUTS[:1]), slots=64)
    assert max(report.tree, report.commit) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_drafted_equals_plain(name):
    """Greedy and sampled, ragged inputs, more of them than rows; each row attends to its own input."""
    model, weights, _ = loaded(name)
    sampling = [Sampling(), Sampling(temperature=1.0, seed=2), Sampling(temperature=0.7, seed=3)]
    common = {"max_new_tokens": 16, "sampling": sampling, "width": 4, "adapt": False, "rows": 2}
    plain = generate(model, weights, INPUTS, drafter=None, **common)
    trie = generate(model, weights, INPUTS, **common)
    attack = generate(model, weights, INPUTS, drafter=AdversarialDrafter("repeated", model.vocab_size), **common)
    for drafted in (trie, attack):
        for one, other in zip(drafted, plain, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
    stats = trie.stats
    assert sum(stats.histogram) == stats.row_steps and stats.tokens == sum(len(out.tokens) for out in trie) == 48
    alone = generate(model, weights, INPUTS[:1], drafter=None, **common | {"sampling": sampling[:1]})
    np.testing.assert_array_equal(alone[0].tokens, plain[0].tokens)
    # What differs from input to input, over all groups of rows; and a drafter that learns from what is likely.
    learns = TrieDrafter(successors=2)
    options = common | {"max_new_tokens": [5, 3, 16], "width": [4, 1, 4]}
    each = generate(model, weights, INPUTS, drafter=learns, **options)
    assert each.tokens == [out.tokens[:limit].tolist() for out, limit in zip(plain, (5, 3, 16), strict=True)]
    assert [out.request for out in each] == [0, 1, 2] and each[1].stats.drafted == 0
    assert len(learns.successors) > 0


def test_nan_names_the_input_and_loses_nothing():
    model, weights, _ = loaded("t5")

    class Breaks(type(model)):
        def with_inputs(self, weights, inputs):
            params = super().with_inputs(weights, inputs)
            broken = jnp.nan if INPUTS[2] in inputs else 1
            return params | {
                "inputs": jax.tree.map(lambda x: x * broken if x.dtype == jnp.float32 else x, params["inputs"])
            }

    broken = Breaks(**vars(model))
    with pytest.raises(BadLogitsError, match=r"inputs\[2\], token 0 of the response") as caught:
        generate(broken, weights, INPUTS, drafter=None, rows=2, max_new_tokens=4)
    assert [(out.request, len(out.tokens)) for out in caught.value.generation] == [(0, 4), (1, 4), (2, 0)]
    assert caught.value.generation.stats.tokens == 8


def test_drafts_come_from_the_input():
    """A drafter sees the input and the start token as one text, so what followed a token there is drafted here."""
    drafter = WithInputs(TrieDrafter(), [[40, 41, 42, 43]])
    drafter.begin("r", [0], namespace=0)
    drafter.extend("r", [41])
    assert drafter.draft("r", 3, 3).tokens[:2] == [42, 43]


def test_gradient_reaches_every_weight():
    model, weights, _ = loaded("t5_gated")
    inputs, tokens = jnp.asarray([INPUTS[0]]), jnp.arange(3, 13)[None]
    mask, positions = jnp.tril(jnp.ones((1, 10, 10), bool)), jnp.arange(10)[None]

    def loss(weights):
        module = model.module(weights)
        encoded = module.encode(inputs, jnp.array([inputs.shape[1]]))
        logits, _ = module(tokens, positions, mask, model.init_cache(1, 10), jnp.int32(0), encoded)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1))

    for path, gradient in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(weights)):
        assert np.all(np.isfinite(gradient)) and np.any(gradient != 0), jax.tree_util.keystr(path)


def test_buckets():
    """Ids ahead and behind have rows of their own in the encoder; in the decoder those ahead count as distance 0."""
    behind = jnp.array([-100, -3, -1, 0, 1, 3, 4, 100])
    both = bucket(behind, both_ways=True, buckets=8, max_distance=12)
    assert both.tolist() == [7, 6, 5, 0, 1, 2, 2, 3]
    one = bucket(behind, both_ways=False, buckets=8, max_distance=12)
    assert one.tolist() == [0, 0, 0, 0, 1, 3, 4, 7]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"inputs": []}, ValueError, "at least one input"),
        ({"inputs": [[3], []]}, ValueError, "each at least one token id"),
        ({"inputs": [[3], [64]]}, ValueError, r"inputs\[1\] holds token ids outside the vocabulary of 64"),
        ({"rows": 0}, ValueError, "rows must be at least 1, got 0"),
        ({"rows": "2"}, TypeError, "rows must be an int, got '2'"),
        ({"width": [1, 2]}, ValueError, "width has 2 entries"),
        ({"max_new_tokens": [1, 2]}, ValueError, "max_new_tokens has 2 entries"),
        ({"sampling": [Sampling()]}, ValueError, "sampling has 1 entries for 3 inputs"),
        ({"sampling": Sampling(num_samples=2)}, ValueError, "num_samples other than 1"),
        ({"namespaces": [1, 2, 3]}, TypeError, "namespaces can't be given"),
        ({"drafter": "none"}, ValueError, "drafter 'none' is unknown"),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    model, weights, _ = loaded("t5")
    with pytest.raises(error, match=message):
        generate(model, weights, **{"inputs": INPUTS} | options)


def test_damaged_checkpoints_are_named(tmp_path):
    with pytest.raises(ValueError, match="feed_forward_proj 'gated-silu' is not supported"):
        T5Config.from_hf({"model_type": "t5", "feed_forward_proj": "gated-silu"})
    shutil.copytree(GOLDEN / "t5", tmp_path / "copy")
    path = tmp_path / "copy" / "config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"num_decoder_layers": 2}, "'decoder.block.2.layer.0.SelfAttention.k.weight', which the model has no place"),
        ({"num_decoder_layers": 4}, "lacks the tensors of .* parameters: decoder.layer_3"),
        ({"d_ff": 47}, "the configuration asks for"),
    ):
        path.write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=f"copy: .*{message}"):
            load(tmp_path / "copy", tokenizer=None)
