"""Unmodified Flax T5 and Bart of `transformers` 4; skipped where they aren't installed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlookahead import check_model
from jaxlookahead.adapters.hf_flax_seq2seq import from_hf_flax_seq2seq
from jaxlookahead.encoder_decoder import generate
from jaxlookahead.sampling.params import Sampling
from jaxlookahead.testing import AdversarialDrafter

tf = pytest.importorskip("transformers")
if int(tf.__version__.split(".")[0]) > 4:
    pytest.skip("Flax models left transformers with version 5", allow_module_level=True)

T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
# So few buckets that 20 tokens reach every kind of them.
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0}
BART = {"vocab_size": 64, "d_model": 32, "max_position_embeddings": 64, "decoder_start_token_id": 2}
BART |= {f"{part}_{field}": n for part in ("encoder", "decoder") for field, n in (("layers", 2), ("ffn_dim", 48))}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "forced_eos_token_id": None}
MODELS = {
    "t5": ("T5", T5),
    "t5_gated": ("T5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("Bart", BART),
}
INPUTS = [[5, 6, 7, 8, 9, 10, 1], [11, 12, 1], [3, 4, 3, 4, 3, 4, 20, 21, 22, 1]]


@functools.cache
def build(name: str):
    """A model whose weights are large enough that its logits are lively."""
    kind, options = MODELS[name]
    made = getattr(tf, f"Flax{kind}ForConditionalGeneration")(getattr(tf, f"{kind}Config")(**options))

    def enlarge(path, leaf):
        wide = leaf.ndim > 1 and "relative" not in jax.tree_util.keystr(path)
        return leaf * (8 if kind == "Bart" else 1.5) if wide else leaf

    made.params = jax.tree_util.tree_map_with_path(enlarge, made.params)
    return made


@pytest.mark.parametrize("name", MODELS)
def test_check_model_and_own_logits(name):
    own = build(name)
    model, weights = from_hf_flax_seq2seq(own)
    assert model.flax_model._params is None and own.params is weights
    params = model.with_inputs(weights, INPUTS[:1])
    report = check_model(model, params, slots=32)
    assert max(report.tree, report.commit) < 1e-4
    tokens = np.random.default_rng(0).integers(3, 60, (1, 20)).astype(np.int32)
    wanted = own(jnp.asarray(INPUTS[:1]), decoder_input_ids=tokens).logits
    assert np.ptp(wanted) > 1
    mask, positions = jnp.tril(jnp.ones((1, 20, 20), bool)), jnp.arange(20)[None]
    found, _ = model.forward(params, tokens, positions, mask, model.init_cache(1, 20), jnp.int32(0))
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_drafted_equals_plain_and_their_own_greedy(name):
    """Ragged inputs, more of them than rows; greedy and sampled."""
    own = build(name)
    model, weights = from_hf_flax_seq2seq(own)
    sampling = [Sampling(), Sampling(temperature=1.0, seed=2), Sampling()]
    common = {"max_new_tokens": 16, "sampling": sampling, "width": 4, "adapt": False, "rows": 2}
    plain = generate(model, weights, INPUTS, drafter=None, **common)
    attack = generate(model, weights, INPUTS, drafter=AdversarialDrafter("repeated", model.vocab_size), **common)
    trie = generate(model, weights, INPUTS, **common)
    for drafted in (attack, trie):
        for one, other in zip(drafted, plain, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
    for i in (0, 2):
        # An end that no token has.
        options = {"max_new_tokens": 16, "num_beams": 1, "do_sample": False, "eos_token_id": 99}
        theirs = own.generate(jnp.asarray(INPUTS[i : i + 1]), **options).sequences[0]
        np.testing.assert_array_equal(plain[i].tokens, theirs[1:])


def test_a_table_of_positions_ends_a_response():
    model, weights = from_hf_flax_seq2seq(build("bart"))
    output = generate(model, weights, INPUTS[:1], max_new_tokens=100, width=4, adapt=False)[0]
    assert len(output.tokens) == model.max_length - 1 == 63


def test_other_models_are_refused():
    with pytest.raises(TypeError, match=r"of type None \(int\) are not supported; supported: bart, t5"):
        from_hf_flax_seq2seq(3)
    with pytest.raises(TypeError, match="FlaxBartModel has no logits of tokens"):
        from_hf_flax_seq2seq(tf.FlaxBartModel(tf.BartConfig(**BART)))
