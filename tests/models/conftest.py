"""Helpers: run a model over tokens at once, one by one, or as a tree."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxlookahead.models import dummy

tiny_decoder = functools.cache(dummy.tiny_decoder)


@functools.partial(jax.jit, static_argnums=0)
def _forward(model, params, tokens, positions, mask, cache, start):
    return model.forward(params, tokens, positions, mask, cache, start)


def run(model, params, tokens, positions, mask, cache, start):
    """One call; numpy in, numpy logits out."""
    arrays = [jnp.asarray(a, jnp.int32) for a in (tokens, positions)]
    logits, cache = _forward(model, params, *arrays, jnp.asarray(mask, bool), cache, jnp.int32(start))
    return np.asarray(logits), cache


def causal(batch: int, tokens: int, slots: int, start: int = 0) -> np.ndarray:
    """Mask for consecutive tokens at slots from `start`, after `start` committed ones."""
    rows = np.arange(slots)[None] <= start + np.arange(tokens)[:, None]
    return np.broadcast_to(rows, (batch, tokens, slots))


def dense(model, params, tokens, slots: int | None = None):
    """All of `tokens` `[B, T]` in one call: logits and cache."""
    batch, count = np.shape(tokens)
    slots = slots or count
    positions = np.broadcast_to(np.arange(count), (batch, count))
    return run(model, params, tokens, positions, causal(batch, count, slots), model.init_cache(batch, slots), 0)


def one_by_one(model, params, tokens, slots: int | None = None):
    """`tokens` `[B, T]` through the cache, one a call: logits."""
    batch, count = np.shape(tokens)
    slots = slots or count
    cache, found = model.init_cache(batch, slots), []
    for t in range(count):
        mask, positions = causal(batch, 1, slots, t), np.full((batch, 1), t)
        logits, cache = run(model, params, np.asarray(tokens)[:, t : t + 1], positions, mask, cache, t)
        found.append(logits)
    return np.concatenate(found, axis=1)
