"""The decoder against itself: caches, trees, windows, layouts, rows, gradients."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlookahead.models import dummy, layers
from jaxlookahead.models.config import DecoderConfig
from jaxlookahead.models.decoder import Decoder, write
from jaxlookahead.models.dummy import TINY
from jaxlookahead.models.flax_nnx import from_nnx, to_nnx
from jaxlookahead.models.rope import RopeConfig

from .conftest import causal, dense, one_by_one, run, tiny_decoder

YARN = RopeConfig(kind="yarn", factor=4.0, original_length=16)
VARIANTS = {
    "llama": {},
    "blocks": {"block": 16},
    "blocks_tied": {"block": 16, "tied": True, "vocab_size": 90},
    "windows": {"windows": (5, None)},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied": True},
    "norms_yarn": {"qk_norm": True, "head_size": 12, "rope": YARN},
    "one_kv_head": {"num_kv_heads": 1},
    "no_grouping": {"num_kv_heads": 4, "block": 8},
}
ATOL = 2e-4


def tokens_of(batch: int, count: int, vocab_size: int = 90, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, (batch, count))


@pytest.mark.parametrize("name", VARIANTS)
def test_at_once_equals_one_by_one(name):
    model, params = tiny_decoder(**VARIANTS[name])
    tokens = tokens_of(2, 12)
    at_once, _ = dense(model, params, tokens, slots=16)
    assert np.ptp(at_once) > 1
    np.testing.assert_allclose(one_by_one(model, params, tokens, slots=16), at_once, atol=ATOL)


@pytest.mark.parametrize("name", VARIANTS)
def test_F2_D2_tree_nodes_equal_their_paths(name):
    """The tree lies far from the prefix, so its slots are not its positions."""
    model, params = tiny_decoder(**VARIANTS[name])
    prefix, slots, parents = tokens_of(1, 9)[0], 40, [-1, 0, 0, 1, 1, 2, 5]
    nodes = tokens_of(1, len(parents), seed=1)[0]
    paths = []
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), i])
    _, cache = dense(model, params, prefix[None], slots=slots)
    start = slots - len(nodes)
    mask = np.zeros((1, len(nodes), slots), bool)
    mask[:, :, : len(prefix)] = True
    for i, path in enumerate(paths):
        mask[0, i, [start + node for node in path]] = True
    positions = np.array([[len(prefix) + len(path) - 1 for path in paths]])
    tree, _ = run(model, params, nodes[None], positions, mask, cache, start)
    for i, path in enumerate(paths):
        count = len(prefix) + len(path)
        alone, _ = dense(model, params, np.resize(np.concatenate([prefix, nodes[path]]), 13)[None])
        np.testing.assert_allclose(tree[0, i], alone[0, count - 1], atol=ATOL)


def test_window_hides_what_is_behind_it():
    model, params = tiny_decoder(windows=(3, 3))
    tokens = tokens_of(1, 20)
    other = tokens.copy()
    other[0, 0] = (other[0, 0] + 1) % 90
    first, second = dense(model, params, tokens)[0], dense(model, params, other)[0]
    # Two layers of window 3 look back over 4 positions besides the token's own.
    assert np.abs(first[0, 4] - second[0, 4]).max() > 1e-3
    np.testing.assert_array_equal(first[0, 5:], second[0, 5:])


def test_window_reaching_back_to_the_start_changes_nothing():
    tokens = tokens_of(1, 10)
    wide, _ = dense(*tiny_decoder(windows=(10, 10)), tokens)
    none, _ = dense(*tiny_decoder(), tokens)
    narrow, _ = dense(*tiny_decoder(windows=(9, 9)), tokens)
    np.testing.assert_array_equal(wide, none)
    assert np.abs(narrow[0, 9] - none[0, 9]).max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "blocks_tied"])
def test_rows_are_independent(name):
    model, params = tiny_decoder(**VARIANTS[name])
    tokens = tokens_of(3, 7)
    together, _ = dense(model, params, tokens)
    for row in range(3):
        np.testing.assert_allclose(together[row], dense(model, params, tokens[row : row + 1])[0][0], atol=ATOL)


@pytest.mark.parametrize("count", [1, 32, 33, 70])
def test_blocked_layout_equals_plain(count):
    """Beyond 32 tokens blocked products take turns; 90 tokens fill the last block of 16 in part."""
    plain, params = tiny_decoder(tied=True, vocab_size=90)
    blocked, template = tiny_decoder(tied=True, vocab_size=90, block=16)
    tokens = tokens_of(1, count)
    moved = to_blocks(params, template)
    np.testing.assert_allclose(dense(blocked, moved, tokens)[0], dense(plain, params, tokens)[0], atol=ATOL)


def test_weights_of_several_parts(monkeypatch):
    monkeypatch.setattr(layers, "PROJECTION_BLOCKS", 3)
    monkeypatch.setattr(layers, "VOCABULARY_BLOCKS", 2)
    plain, params = dummy.tiny_decoder(tied=True, vocab_size=90)
    blocked, template = dummy.tiny_decoder(tied=True, vocab_size=90, block=16)
    assert len(template["embed"]) == 3 and len(template["layer_0"]["mlp"]["gate_up"]) == 3
    tokens = np.arange(90)[None]
    moved = to_blocks(params, template)
    np.testing.assert_allclose(dense(blocked, moved, tokens)[0], dense(plain, params, tokens)[0], atol=ATOL)


def to_blocks(plain, template):
    """The same parameters in the layout of `template`."""
    if "part_0" not in template:
        return {k: to_blocks(plain[k], v) if isinstance(v, dict) else plain[k] for k, v in template.items()}
    parts, done = {k: v for k, v in plain.items() if k != "weight"}, 0
    for i in range(sum(k.startswith("part") for k in template)):
        blocks, size, block = template[f"part_{i}"].shape
        part = plain["weight"][done : done + blocks * block]
        part = jnp.pad(part, ((0, blocks * block - len(part)), (0, 0)))
        parts[f"part_{i}"] = part.reshape(blocks, block, size).swapaxes(1, 2)
        done += blocks * block
    assert done >= len(plain["weight"])
    return parts


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("slots", [3, 8])
def test_write_touches_its_slots_only(count, slots):
    for start in range(slots - count + 1):
        old, new = np.arange(2 * slots).reshape(2, slots), -1 - np.arange(2 * count).reshape(2, count)
        expected = old.copy()
        expected[:, start : start + count] = new
        written = write(jnp.asarray(old), jnp.asarray(new), jnp.int32(start), axis=1)
        np.testing.assert_array_equal(written, expected)


def test_write_to_a_single_slot():
    np.testing.assert_array_equal(write(jnp.zeros((2, 1)), jnp.ones((2, 1)), jnp.int32(0), axis=1), np.ones((2, 1)))


def test_D11_every_layer_writes_the_new_slots_and_no_other():
    model, params = tiny_decoder()
    cache = jax.tree.map(lambda leaf: leaf + 7, model.init_cache(1, 10))
    _, after = run(model, params, tokens_of(1, 3), [[2, 3, 4]], causal(1, 3, 10, 2), cache, 5)
    for layer in after.values():
        for leaf, axis in ((layer["k"], 3), (layer["v"], 2)):
            changed = np.any(np.moveaxis(np.asarray(leaf) != 7, axis, 0).reshape(10, -1), axis=1)
            np.testing.assert_array_equal(changed, (np.arange(10) >= 5) & (np.arange(10) < 8))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_cache_is_written_in_place(count, batch):
    """Whole-cache copies would cost as much as the cache is long, in every layer."""
    model, params = tiny_decoder()
    step = jax.jit(model.forward, donate_argnums=4)
    tokens = jnp.zeros((batch, count), jnp.int32)
    mask, cache = jnp.ones((batch, count, 64), bool), model.init_cache(batch, 64)
    compiled = step.lower(params, tokens, tokens, mask, cache, jnp.int32(5)).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert compiled.memory_analysis().alias_size_in_bytes == size
    text, shapes = compiled.as_text(), {leaf.shape for leaf in jax.tree.leaves(cache)}
    spelled = [",".join(map(str, s)) for s in shapes | {s[1:] for s in shapes}]
    assert not [s for s in spelled for line in text.splitlines() if f"f32[{s}]" in line and "} copy(" in line]


def test_cache_has_a_batch_and_a_slot_axis_and_the_dtype():
    model, _ = tiny_decoder(dtype="bfloat16")
    shapes = {leaf.shape for leaf in jax.tree.leaves(model.init_cache(3, 20))}
    assert shapes == {(3, 2, 8, 20), (3, 2, 20, 8)}
    assert {leaf.dtype for leaf in jax.tree.leaves(model.init_cache(1, 4))} == {jnp.dtype("bfloat16")}


def test_bfloat16_gives_float32_logits_near_the_float32_ones():
    model, params = tiny_decoder()
    narrow, template = tiny_decoder(dtype="bfloat16")
    tokens = tokens_of(1, 8)
    exact = dense(model, params, tokens)[0]
    found = dense(narrow, jax.tree.map(lambda p, t: p.astype(t.dtype), params, template), tokens)[0]
    assert found.dtype == np.float32
    assert np.sqrt(np.mean((found - exact) ** 2)) < 0.1 * np.std(exact)


@pytest.mark.parametrize("name", ["llama", "blocks_tied", "norms_yarn"])
def test_gradient_reaches_every_parameter(name):
    model, params = tiny_decoder(**VARIANTS[name])
    tokens = jnp.asarray(tokens_of(1, 8))
    mask, positions = jnp.asarray(causal(1, 8, 8)), jnp.arange(8)[None]

    def loss(params):
        logits, _ = model.forward(params, tokens, positions, mask, model.init_cache(1, 8), 0)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1))

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.all(np.isfinite(gradient)) and np.any(gradient != 0), jax.tree_util.keystr(path)
    assert np.isfinite(value)


def test_gradient_is_finite_at_extreme_gates():
    model, params = tiny_decoder()
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * 1e3 if "gate_up" in jax.tree_util.keystr(path) else leaf, params
    )
    tokens = jnp.asarray(tokens_of(1, 8))
    cache, mask = model.init_cache(1, 8), jnp.asarray(causal(1, 8, 8))
    total = jax.jit(lambda p: model.forward(p, tokens, jnp.arange(8)[None], mask, cache, 0)[0].sum())
    gradients = jax.jit(jax.grad(total))(params)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))


def test_trains_as_an_nnx_module():
    optax = pytest.importorskip("optax")
    model, params = tiny_decoder()
    module = to_nnx(model, params)
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)
    tokens = jnp.asarray(tokens_of(1, 8))
    mask, positions = jnp.asarray(causal(1, 8, 8)), jnp.arange(8)[None]

    def loss(module):
        logits, _ = module(tokens, positions, mask, module.init_cache(1, 8), 0)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1))

    @nnx.jit
    def step(module, optimizer):
        value, gradients = nnx.value_and_grad(loss)(module)
        optimizer.update(module, gradients)
        return value

    values = [float(step(module, optimizer)) for _ in range(20)]
    assert values[-1] < 0.1 * values[0]
    again, trained = from_nnx(module)
    assert again == model and hash(again) == hash(model)
    logits, _ = again.forward(trained, tokens, positions, mask, again.init_cache(1, 8), 0)
    expected, _ = module(tokens, positions, mask, module.init_cache(1, 8), 0)
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("field", ["block", "qk_norm", "windows", "dtype"])
def test_models_of_other_configurations_differ(field):
    value = {"block": 8, "qk_norm": True, "windows": (4, None), "dtype": "bfloat16"}[field]
    model, same, other = tiny_decoder()[0], tiny_decoder(seed=1)[0], tiny_decoder(**{field: value})[0]
    assert model == same and hash(model) == hash(same) and model != other and model != "model"


def test_from_nnx_names_what_a_module_lacks():
    class Half(nnx.Module):
        vocab_size = 3

        def __call__(self, *arrays):
            return arrays

    with pytest.raises(TypeError, match="Half lacks max_length, init_cache"):
        from_nnx(Half())


def test_contract_fields():
    model, _ = tiny_decoder()
    assert (model.vocab_size, model.max_length) == (96, 512)
    assert Decoder(TINY, rngs=nnx.Rngs(0)).max_length == 512


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_kv_heads", 3, "num_kv_heads=3 must divide num_heads=4"),
        ("head_size", 7, "head_size must be even"),
        ("hidden_size", 0, "hidden_size must be a positive integer, got 0"),
        ("windows", (4,), "windows has 1 entries for 2 layers"),
        ("windows", (4, 0), "windows must be positive or None"),
        ("activation", "mish", "activation 'mish' is not supported; supported: silu, gelu"),
        ("block", -1, "block must be None, 0 or a positive integer, got -1"),
    ],
)
def test_bad_field_is_named(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **{field: value})


def test_F10_unknown_field_is_a_type_error():
    with pytest.raises(TypeError, match="hidden"):
        DecoderConfig(hidden=3)
    with pytest.raises(TypeError, match="layers"):
        tiny_decoder(layers=3)


def test_tiny_decoder_is_lively():
    """Greedy decoding neither repeats one token nor meets near ties."""
    for seed in range(2):
        model, params = tiny_decoder(seed)
        tokens, cache, margins = tokens_of(1, 6, seed=seed)[0].tolist(), model.init_cache(1, 48), []
        for t in range(46):
            logits, cache = run(model, params, [[tokens[t]]], [[t]], causal(1, 1, 48, t), cache, t)
            second, first = np.sort(logits[0, 0])[-2:]
            if t >= 5:
                margins.append(first - second)
                tokens.append(int(logits[0, 0].argmax()))
        assert len(set(tokens[6:])) > 15 and min(margins) > 1e-3
