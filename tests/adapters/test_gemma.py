"""Unmodified models of the `gemma` package; skipped where it isn't installed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlookahead import check_model, generate
from jaxlookahead.adapters.gemma import from_gemma
from jaxlookahead.sampling.params import Sampling
from jaxlookahead.testing import OracleDrafter

gm = pytest.importorskip("gemma.gm", reason="gemma is not installed")


def build():
    """A small Gemma 3 with a local and a global layer, and its parameters."""
    from gemma.gm.nn import _modules

    kinds = (_modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL)
    sizes = {"num_embed": 64, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
    config = dataclasses.replace(gm.nn.Gemma3_270M.config, **sizes, attention_types=kinds, sliding_window_size=6)
    module = gm.nn.Gemma3_270M(config=config, dtype=jnp.float32)
    params = module.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    return module, jax.tree.map(lambda leaf: leaf * 3 if leaf.ndim > 1 else leaf, params)


def test_check_model_own_logits_and_ragged_batch():
    module, params = build()
    model = from_gemma(module)
    report = check_model(model, params, slots=64)
    assert max(report.tree, report.commit) < 1e-4
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 60, (1, 20)))
    mask, positions = jnp.tril(jnp.ones((1, 20, 20), bool)), jnp.arange(20)[None]
    found, _ = model.forward(params, tokens, positions, mask, model.init_cache(1, 20), jnp.int32(0))
    np.testing.assert_allclose(found, module.apply({"params": params}, tokens).logits, atol=1e-4)

    prompts = [np.random.default_rng(i).integers(3, 60, n).tolist() for i, n in enumerate((3, 9, 17, 6))]
    sampling = [Sampling(), Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, seed=5)]
    common = {"max_new_tokens": 20, "width": 4, "adapt": False, "sampling": sampling}
    plain = generate(model, params, prompts, drafter=None, **common)
    right = {tuple(p): out.tokens.tolist() for p, out in zip(prompts, plain, strict=True)}
    drafted = generate(model, params, prompts, drafter=OracleDrafter(right, 64), **common)
    for one, other in zip(drafted, plain, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    assert drafted.stats.accepted > 10


def test_other_modules_are_refused():
    from flax import linen

    with pytest.raises(TypeError, match="Dense is not a transformer of the gemma package"):
        from_gemma(linen.Dense(3))
