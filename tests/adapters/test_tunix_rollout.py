"""tunix's rollout interface against its own engine, and inside its cluster; skipped where it isn't installed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from .test_tunix import BOS, EOS, PAD, Digits, build  # skips without the package

pytest.importorskip("tunix.rl.rl_cluster", reason="tunix.rl is not installed")

from tunix.rl import rl_cluster
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from jaxlookahead.adapters.tunix_rollout import LookaheadRollout

RNG = np.random.default_rng(1)
# Ragged; the beginning-of-text token comes from the tokenizer.
PROMPTS = [Digits().decode(RNG.integers(3, 60, n)) for n in (3, 9, 17, 6)]
CACHE = CacheConfig(cache_size=64, num_layers=2, num_kv_heads=2, head_dim=8)
GREEDY = RolloutConfig(max_tokens_to_generate=20, max_prompt_length=24, top_p=None, return_logprobs=True)
SAMPLED = RolloutConfig(
    max_tokens_to_generate=12, temperature=1.0, top_p=0.95, seed=jax.random.key(3), return_logprobs=True
)
OPTIONS = {"width": 4, "adapt": False, "rows": 4}


def same(one, other):
    for a, b in zip(one.tokens, other.tokens, strict=True):
        np.testing.assert_array_equal(a, b)
    assert one.text == other.text
    np.testing.assert_array_equal(one.left_padded_prompt_tokens, other.left_padded_prompt_tokens)
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama3", "Qwen3"])
def test_greedy_equals_tunix_own_engine(name):
    module = build(name)
    ours, theirs = LookaheadRollout(module, Digits(), **OPTIONS), VanillaRollout(module, Digits(), CACHE)
    wanted = theirs.generate(PROMPTS, GREEDY)
    for _ in range(2):
        same(ours.generate(PROMPTS, GREEDY), wanted)
    # The second time the trie knew every response.
    assert ours.last.generation.stats.tokens_per_call > 2
    prompts, (tokens, _) = wanted.left_padded_prompt_tokens, (np.array(wanted.tokens[:1]), None)
    arguments = (jnp.asarray(prompts[:1]), jnp.asarray(tokens))
    np.testing.assert_allclose(ours.get_per_token_logps(*arguments), theirs.get_per_token_logps(*arguments), atol=1e-5)
    assert (ours.pad_id(), ours.eos_id(), ours.model()) == (PAD, EOS, module)


def test_sampled_drafted_equals_plain():
    """Groups of one size share a prefill and come back in the order that they were asked for in."""
    module = build("Qwen3")
    prompts = [PROMPTS[i] for i in (1, 0, 1, 0)]
    plain = LookaheadRollout(module, Digits(), drafter=None, **OPTIONS)
    drafted = LookaheadRollout(module, Digits(), keep_eos=True, **OPTIONS)
    wanted = plain.generate(prompts, SAMPLED)
    for _ in range(2):
        found = drafted.generate(prompts, SAMPLED)
        found.tokens = [each[: each.tolist().index(EOS)] if EOS in each else each for each in found.tokens]
        found.logprobs = [each[: len(kept)] for each, kept in zip(found.logprobs, found.tokens, strict=True)]
        found.text = wanted.text
        same(found, wanted)
    assert drafted.last.generation.stats.row_steps < plain.last.generation.stats.row_steps
    assert wanted.tokens[0].tolist() != wanted.tokens[2].tolist()
    for row, prompt in zip(found.left_padded_prompt_tokens, prompts, strict=True):
        assert row[row != PAD].tolist() == [BOS, *map(int, prompt.split())]
    # Without a seed every call draws anew.
    unseeded = RolloutConfig(max_tokens_to_generate=12, temperature=1.0)
    first, second = (plain.generate(prompts, unseeded).text for _ in range(2))
    assert first != second


def test_updated_parameters():
    """What the trainer sends is used at once, in the old dtype, also where the engine holds a copy on a mesh."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    module, other = build("Llama3"), build("Llama3", seed=5)
    ours = LookaheadRollout(module, Digits(), mesh, **OPTIONS)
    assert ours.model() is not module
    before = ours.generate(PROMPTS[:1], GREEDY)
    sent = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(other, nnx.Param))
    ours.update_params(sent, (nnx.Param,))
    rounded = build("Llama3")
    nnx.update(rounded, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), sent))
    same(
        ours.generate(PROMPTS[:1], GREEDY), LookaheadRollout(rounded, Digits(), **OPTIONS).generate(PROMPTS[:1], GREEDY)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(ours.model()))} == {jnp.dtype("float32")}
    ours.update_params(nnx.to_pure_dict(nnx.state(module)))
    same(ours.generate(PROMPTS[:1], GREEDY), before)
    with pytest.raises(ValueError, match="params holds extra, which the rollout model has no place for"):
        ours.update_params({"extra": jnp.zeros(1)})


def test_inside_a_cluster():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster = rl_cluster.RLCluster(
        actor=build("Qwen3"),
        tokenizer=Digits(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role: mesh for role in rl_cluster.Role},
            rollout_engine=functools.partial(LookaheadRollout, **OPTIONS),
            rollout_config=SAMPLED,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.sgd(1e-3), eval_every_n_steps=10, max_steps=10
            ),
        ),
    )
    for shift in (0.0, 0.05):
        trained = cluster.actor_trainer.model
        nnx.update(trained, jax.tree.map(lambda leaf, shift=shift: leaf + shift, nnx.state(trained)))
        cluster.sync_weights()
        found = cluster.generate(PROMPTS[:2], micro_batch_size=2)
        plain = LookaheadRollout(trained, Digits(), drafter=None, **OPTIONS)
        same(found, plain.generate(PROMPTS[:2], SAMPLED))


def test_what_is_not_supported_is_named():
    ours = LookaheadRollout(build("Llama3"), Digits())
    with pytest.raises(TypeError, match="does not support images"):
        ours.generate(PROMPTS, GREEDY, images=[])
    with pytest.raises(TypeError, match="Linear are not supported"):
        LookaheadRollout(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), Digits())
