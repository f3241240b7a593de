"""Keyed noise: the number for output `t` of request `r` is a function of `(seed, r, t)` alone.

The generator is written out here, in place of `jax.random`, because the bits that `jax.random` draws depend
on the user's `jax_default_prng_impl` and `jax_threefry_partitionable`, and on the shape that is drawn. Here
every number has its own counter, so batch size, slot, draft, tree, sharding and flags can't change it. (The
bits are the same everywhere; the logarithms that turn them into Gumbel noise may be rounded otherwise by
another compiled program, like the logits that they are added to.)
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from jax import lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


class Stream(enum.IntEnum):
    """What a number is drawn for; numbers of different streams are independent."""

    TOKEN = 0  # the target's own noise, one number per vocabulary entry
    DRAFT = 1  # choosing children in a stochastic draft
    ACCEPT = 2  # accepting or rejecting them, and the token after a rejection


def threefry2x32(k0: jax.Array, k1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Args:
      k0: first key word, uint32, any shape that broadcasts with the others.
      k1: second key word.
      x0: first counter word.
      x1: second counter word.

    Returns:
      Two uint32 arrays of the broadcast shape.
    """
    k0, k1, x0, x1 = (jnp.asarray(word, jnp.uint32) for word in (k0, k1, x0, x1))
    schedule = (k0, k1, k0 ^ k1 ^ jnp.uint32(_PARITY))
    x0, x1 = x0 + k0, x1 + k1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def stream_key(seed: jax.Array, request: jax.Array, position: jax.Array, stream: Stream) -> jax.Array:
    """Derives the key of one output token.

    Args:
      seed: `[..., 2]` uint32, low and high word of the seed.
      request: `[...]` int32 request id.
      position: `[...]` int32, the number of tokens that the request emitted before this one.
      stream: what the numbers are for.

    Returns:
      `[..., 2]` uint32 key.
    """
    seed = jnp.asarray(seed, jnp.uint32)
    k0, k1 = threefry2x32(seed[..., 0], seed[..., 1], request, jnp.uint32(stream))
    return jnp.stack(threefry2x32(k0, k1, position, jnp.uint32(0)), axis=-1)


def bits(key: jax.Array, size: int, offset: int = 0) -> jax.Array:
    """Draws `[..., size]` uint32 words: word `i` is a function of `key` and `offset + i` alone.

    Args:
      key: `[..., 2]` uint32.
      size: number of words.
      offset: first counter; draws from one key must not overlap.
    """
    counter = lax.iota(jnp.uint32, size) + jnp.uint32(offset)
    return threefry2x32(key[..., 0, None], key[..., 1, None], jnp.uint32(0), counter)[0]


def uniform(key: jax.Array, size: int, offset: int = 0) -> jax.Array:
    """Draws `[..., size]` float32 in `[0, 1)`, multiples of 2^-24."""
    return (bits(key, size, offset) >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def gumbel(key: jax.Array, size: int, offset: int = 0) -> jax.Array:
    """Draws `[..., size]` float32 of standard Gumbel noise, `-log(-log(1 - u))`.

    The small `u` become the large values, the ones that decide an argmax, and a float32 resolves those down
    to 2^-33: tokens of probability 1e-9 are drawn as often as they should be.
    """
    u = (bits(key, size, offset).astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(u, jnp.float32(1 - 2**-24))))


def token_noise(seed: jax.Array, request: jax.Array, position: jax.Array, vocab_size: int) -> jax.Array:
    """Draws the Gumbel noise that decides one output token.

    `argmax(log p + noise)` is distributed as `p`. Entry `v` doesn't depend on `vocab_size`.

    Args:
      seed: `[..., 2]` uint32.
      request: `[...]` int32.
      position: `[...]` int32, tokens emitted before.
      vocab_size: `V`.

    Returns:
      `[..., V]` float32.
    """
    return gumbel(stream_key(seed, request, position, Stream.TOKEN), vocab_size)
