"""Parts of the built-in decoder: norms, projections, the embedding, as Flax nnx modules.

Weights have one of two layouts. The plain one is one parameter `weight`, `[out, in]`. The blocked one is several,
`part_0`, `part_1`, ..., each `[blocks, in, block]` for so many blocks of outputs. XLA's products on CPU then read
memory in the order in which it lies, one product a block. Every block of a part needs its own copy of the input; the
parts share the copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxlookahead.layout import as_it_lies, lies_swapped, one_device

# Tokens that a blocked product takes at once, the most that a lookup on TPU takes one by one, and blocks in a part of
# a projection and of a vocabulary.
TOKENS_AT_ONCE = 32
TOKENS_ONE_BY_ONE = 128
PROJECTION_BLOCKS = 12
VOCABULARY_BLOCKS = 48


class Norm(nnx.Module):
    """Norm of the last axis, in float32.

    Root mean square (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467), or mean and variance with a bias
    (Ba et al. 2016, https://arxiv.org/abs/1607.06450).

    Args:
      size: of the axis.
      eps: added to the mean square or the variance.
      dtype: of the parameters.
      kind: see `DecoderConfig.norm`.
    """

    def __init__(self, size: int, eps: float, dtype: str, kind: str = "rms"):
        self.eps, self.kind = eps, kind
        self.scale = nnx.Param(jnp.full((size,), 0 if kind == "rms_offset" else 1, dtype))
        self.bias = nnx.Param(jnp.zeros((size,), dtype)) if kind == "layer" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        if self.bias is not None:
            x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        if self.bias is not None:
            return (x32 * self.scale[...] + self.bias[...]).astype(x.dtype)
        if self.kind == "rms_offset":
            # Added in float32: close to 1, a shorter type would lose most of the parameter's digits.
            return (x32 * (1 + self.scale[...].astype(jnp.float32))).astype(x.dtype)
        return self.scale[...] * x32.astype(x.dtype)


class Linear(nnx.Module):
    """A weight in either layout.

    Args:
      out: size of the output; a blocked last part ends in zeros where it isn't a multiple of the block.
      into: size of the input.
      block: outputs in a block; 0: the plain layout.
      at_once: the most blocks in a part.
      dtype: of the parameters.
      rngs: for the initial weight, stream `params`.
    """

    def __init__(self, out: int, into: int, *, block: int, at_once: int, dtype: str, rngs: nnx.Rngs):
        self.out = out
        sizes = part_sizes(out, block, at_once)
        self.parts = len(sizes)
        for i, blocks in enumerate(sizes):
            setattr(self, f"part_{i}", _random((blocks, into, block), into, dtype, rngs))
        if not sizes:
            self.weight = _random((out, into), into, dtype, rngs)

    def blocked(self) -> list[jax.Array]:
        """The parts; none in the plain layout."""
        return [getattr(self, f"part_{i}")[...] for i in range(self.parts)]

    def product(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """`[B, T, in]` to `[B, T, out]`, summed and returned in `dtype` if given."""
        if not self.parts:
            return _plain_product(self.weight[...], x, dtype)
        return _blocked_product(self.blocked(), x, dtype)[..., : self.out]


class Projection(Linear):
    """A weight and, with `bias`, a bias `[out]`; blocked only where the block divides `out`. See `Linear`."""

    def __init__(self, out: int, into: int, *, bias: bool, block: int, dtype: str, rngs: nnx.Rngs):
        block = block if block and out % block == 0 else 0
        super().__init__(out, into, block=block, at_once=PROJECTION_BLOCKS, dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((out,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, in]` to `[B, T, out]`."""
        y = self.product(x)
        return y if self.bias is None else y + self.bias[...]


class Embedding(Linear):
    """Token vectors, and the output projection of logits: a weight from `E` to `V`. Arguments: see `Linear`."""

    def __init__(self, vocab_size: int, size: int, *, block: int, dtype: str, rngs: nnx.Rngs):
        super().__init__(vocab_size, size, block=block, at_once=VOCABULARY_BLOCKS, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[B, T]` token ids to `[B, T, E]`."""
        if not self.parts:
            return _lookup(self.weight[...], tokens)
        first, *rest = self.blocked()
        block, rows = first.shape[2], first.shape[0] * first.shape[2]
        found = first[jnp.minimum(tokens, rows - 1) // block, :, tokens % block]
        for i, part in enumerate(rest, 1):
            inside = tokens - i * rows
            # Tokens of other parts all look at one place, so that this costs no memory traffic.
            vector = part[jnp.clip(inside // block, 0, part.shape[0] - 1), :, jnp.where(inside < 0, 0, inside) % block]
            found = jnp.where((inside >= 0)[..., None], vector, found)
        return found

    def logits(self, x: jax.Array) -> jax.Array:
        """`[B, T, E]` to float32 `[B, T, V]`."""
        return self.product(x, jnp.float32)


def activate(kind: str, gate: jax.Array, up: jax.Array | None = None) -> jax.Array:
    """`f(gate)`, or `f(gate) * up`, with `f` named as in `DecoderConfig.activation`."""
    if kind == "silu" and up is not None:
        # With the division last: XLA on CPU fuses anything cheaper into the copies that a blocked product makes of
        # its input, and computes it anew for each. The bound keeps the gradient finite.
        return gate * up / (1 + jnp.exp(-jnp.maximum(gate, -80)))
    if kind in ("gelu", "gelu_tanh"):
        y = jax.nn.gelu(gate, approximate=kind == "gelu_tanh")
    else:
        y = jax.nn.silu(gate) if kind == "silu" else jax.nn.relu(gate)
    return y if up is None else y * up


def _lookup(weight: jax.Array, tokens: jax.Array) -> jax.Array:
    """`[V, E]` and `[B, T]` token ids to `[B, T, E]`."""

    def gather(weight: jax.Array, tokens: jax.Array) -> jax.Array:
        return jnp.take(weight, tokens, axis=0)

    def one_by_one(weight: jax.Array, tokens: jax.Array) -> jax.Array:
        weight, ids = as_it_lies(weight), jnp.clip(tokens.reshape(-1), 0, weight.shape[0] - 1)
        rows = [as_it_lies(lax.dynamic_slice_in_dim(weight, i, 1), weight) for i in ids]
        return jnp.concatenate(rows).reshape(*tokens.shape, -1)

    # A gather would copy all of a weight that lies swapped.
    if one_device() and lies_swapped(weight) and tokens.size <= TOKENS_ONE_BY_ONE:
        return lax.platform_dependent(weight, tokens, tpu=one_by_one, default=gather)
    return gather(weight, tokens)


def part_sizes(out: int, block: int, at_once: int) -> list[int]:
    """Blocks in each part of a blocked weight: full parts, then the rest; none where `block` is 0."""
    blocks = -(-out // block) if block else 0
    return [min(at_once, blocks - i) for i in range(0, blocks, at_once)]


def _random(shape: tuple[int, ...], into: int, dtype: str, rngs: nnx.Rngs) -> nnx.Param[jax.Array]:
    return nnx.Param((jax.random.normal(rngs.params(), shape) * into**-0.5).astype(dtype))


def _plain_product(weight: jax.Array, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """`[out, in]` and `[B, T, in]` to `[B, T, out]`."""
    # With the weight on the left XLA on CPU uses it as it lies; on the right it copies it first.
    return jnp.moveaxis(jnp.tensordot(weight, x, (1, 2), preferred_element_type=dtype), 0, -1)


def _blocked_product(weights: Sequence[jax.Array], x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Weights `[out / block, in, block]`, one after the other, and `[B, T, in]` to `[B, T, sum of out]`."""
    if x.shape[0] * x.shape[1] == 1:
        # XLA on CPU has a way of its own with one vector, which is a quarter slower than the one with two.
        return _blocked_product(weights, jnp.concatenate([x, x]), dtype)[:1]

    def product(rows: jax.Array) -> jax.Array:
        found = []
        for weight in weights:
            copies = jnp.broadcast_to(rows, (weight.shape[0], *rows.shape))
            y = jnp.einsum("nmi,nio->nmo", copies, weight, preferred_element_type=dtype)
            found.append(jnp.swapaxes(y, 0, 1).reshape(rows.shape[0], -1))
        return found[0] if len(found) == 1 else jnp.concatenate(found, axis=-1)

    return in_turns(product, x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def in_turns(product: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    """`product(rows)`, at most `TOKENS_AT_ONCE` rows at once."""
    count = rows.shape[0]
    turns = math.ceil(count / TOKENS_AT_ONCE)
    if turns == 1:
        return product(rows)
    padded = jnp.pad(rows, ((0, turns * TOKENS_AT_ONCE - count), (0, 0)))
    y = lax.map(product, padded.reshape(turns, TOKENS_AT_ONCE, -1))
    return y.reshape(turns * TOKENS_AT_ONCE, -1)[:count]
