"""Parts of the built-in decoder: norms, projections, the embedding, as Flax nnx modules."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

# Tokens that a blocked product takes at once; more go through in turns, as each block gets a copy of its input.
_TURN = 32


class Norm(nnx.Module):
    """Root-mean-square norm of the last axis, in float32 (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, eps: float, dtype: str):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return self.scale[...] * x32.astype(x.dtype)


class Projection(nnx.Module):
    """`x @ weight.T + bias`.

    The weight is `[out, in]`, or `[out / block, in, block]`. The blocked layout makes XLA's products on CPU read memory
    in the order in which it lies: for 4 to 32 tokens they take two thirds of the time.

    Args:
      out: size of the output.
      into: size of the input.
      bias: whether there is a bias, `[out]`.
      block: outputs in a block; 0, or where it doesn't divide `out`: the plain layout.
      dtype: of the parameters.
      rngs: for the initial weight, stream `params`.
    """

    def __init__(self, out: int, into: int, *, bias: bool, block: int, dtype: str, rngs: nnx.Rngs):
        shape = weight_shape(out, into, block)
        self.weight = nnx.Param((jax.random.normal(rngs.params(), shape) * into**-0.5).astype(dtype))
        self.bias = nnx.Param(jnp.zeros((out,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, in]` to `[B, T, out]`."""
        weight = self.weight[...]
        y = jnp.moveaxis(jnp.tensordot(weight, x, (1, 2)), 0, -1) if weight.ndim == 2 else _blocked(weight, x)
        return y if self.bias is None else y + self.bias[...]


def weight_shape(out: int, into: int, block: int) -> tuple[int, ...]:
    """Shape of a projection's weight."""
    return (out // block, into, block) if block and out % block == 0 else (out, into)


def _blocked(weight: jax.Array, x: jax.Array) -> jax.Array:
    count = math.prod(x.shape[:-1])
    flat = x.reshape(count, x.shape[-1])
    if count <= _TURN:
        y = _one_turn(weight, flat)
    else:
        turns = -(-count // _TURN)
        padded = jnp.pad(flat, ((0, turns * _TURN - count), (0, 0)))
        y = lax.map(lambda rows: _one_turn(weight, rows), padded.reshape(turns, _TURN, -1))
        y = y.reshape(turns * _TURN, -1)[:count]
    return y.reshape(*x.shape[:-1], -1)


def _one_turn(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`[out / block, in, block]` and `[M, in]` to `[M, out]`."""
    y = jnp.einsum("nmi,nio->nmo", jnp.broadcast_to(x, (weight.shape[0], *x.shape)), weight)
    return jnp.swapaxes(y, 0, 1).reshape(x.shape[0], -1)


class Embedding(nnx.Module):
    """Token vectors `[V, E]`, which are also the output projection of a tied model."""

    def __init__(self, vocab_size: int, size: int, *, dtype: str, rngs: nnx.Rngs):
        self.weight = nnx.Param((jax.random.normal(rngs.params(), (vocab_size, size)) * size**-0.5).astype(dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[B, T]` token ids to `[B, T, E]`."""
        return jnp.take(self.weight[...], tokens, axis=0)

    def logits(self, x: jax.Array) -> jax.Array:
        """`[B, T, E]` to float32 `[B, T, V]`."""
        # In this order XLA on CPU uses the weight as it lies; the other way round it copies it first.
        y = jnp.tensordot(self.weight[...], x, (1, 2), preferred_element_type=jnp.float32)
        return jnp.moveaxis(y, 0, -1)
