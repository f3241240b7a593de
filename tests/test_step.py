from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlookahead import tree
from jaxlookahead.step import prefill, verify


def test_verify_inside_jit_then_D1_next_logits_equal_a_fresh_prefill(tiny):
    """D1, D4: whatever is accepted, the next step sees what a fresh prefill of the same tokens sees."""
    model, params = tiny
    rng = np.random.default_rng(0)
    lengths = np.array([4, 9])
    texts = rng.integers(0, 50, (2, 10)).astype(np.int32)
    step = jax.jit(functools.partial(verify, model))

    score = jax.jit(lambda tokens: prefill(model, params, model.init_cache(1, 32), tokens, jnp.int32(0))[0][0])

    def fresh(tokens):
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(score(padded))[: len(tokens)]

    fill = jax.jit(lambda tokens: prefill(model, params, model.init_cache(2, 64), tokens, jnp.int32(0))[1])

    # What the model says after each text, to build trees accepted to every depth.
    right = []
    for row in range(2):
        text = texts[row, : lengths[row] + 1].tolist()
        for _ in range(5):
            text.append(int(fresh(text)[-1].argmax()))
        right.append(text[lengths[row] + 1 :])
    for depth in range(5):
        cache = fill(texts[:, :9])
        paths = [[*answer[:depth], (answer[depth] + 1) % 50, 7] for answer in right]
        drafts = [tree.draft_from_paths([[49, 3], path, [*path[:1], 48]]) for path in paths]
        trees = tree.from_drafts([texts[0, 4], texts[1, 9]], drafts, width=16)
        done = step(params, cache, jnp.asarray(lengths), trees)
        assert done.walk.counts.tolist() == [depth + 1] * 2
        assert done.lengths.tolist() == (lengths + depth + 1).tolist()
        emitted = np.asarray(done.walk.tokens[:, : depth + 1])
        assert emitted.tolist() == [answer[: depth + 1] for answer in right]
        again = step(params, done.cache, done.lengths, tree.from_drafts(emitted[:, -1], [tree.Draft()] * 2))
        for row in range(2):
            text = [*texts[row, : lengths[row] + 1], *emitted[row]]
            np.testing.assert_allclose(again.logits[row, 0], fresh(text)[-1], rtol=1e-4, atol=1e-4)


def test_B33_node_logits_equal_plain_steps(tiny):
    model, params = tiny
    path = [3, 1, 4, 1, 5]
    chain = tree.from_drafts([2], [tree.draft_from_paths([path])])
    step = jax.jit(functools.partial(verify, model))
    wide = step(params, model.init_cache(1, 32), jnp.array([0]), chain)
    cache, lengths = model.init_cache(1, 32), jnp.array([0])
    for node, token in enumerate([2, *path]):
        done = step(params, cache, lengths, tree.from_drafts([token], [tree.Draft()]))
        np.testing.assert_allclose(done.logits[0, 0], wide.logits[0, node], rtol=1e-4, atol=1e-4)
        cache, lengths = done.cache, done.lengths


@pytest.mark.parametrize("width", [1, 4])
def test_empty_slots_change_nothing(tiny, width):
    model, params = tiny
    drafts = [tree.draft_from_paths([[1, 2, 3]])] if width > 1 else [tree.Draft()]
    trees = tree.from_drafts([2], drafts, width)
    step = jax.jit(functools.partial(verify, model))
    a, b = (step(params, model.init_cache(1, slots), jnp.array([0]), trees) for slots in (8, 200))
    np.testing.assert_allclose(a.logits, b.logits, rtol=1e-4, atol=1e-4)
