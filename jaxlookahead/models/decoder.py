"""The built-in decoder: pre-norm blocks of grouped-query attention and gated feed-forward, as Flax nnx modules.

Weights are held `[out, in]` and activations with features first, `[E, B, T]`, so that every projection is
`weight @ x`: on CPU this orientation is the fastest for few tokens. Keys are cached as `[B, K, H, S]`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxlookahead.models.config import DecoderConfig
from jaxlookahead.models.rope import rotation

__all__ = ["Decoder", "DecoderConfig"]

LayerCache = dict[str, jax.Array]
Cache = dict[str, LayerCache]


class Norm(nnx.Module):
    """Root-mean-square norm over one axis, in float32 (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, eps: float, dtype: str):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: jax.Array, axis: int = 0) -> jax.Array:
        x32 = x.astype(jnp.float32)
        x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=axis, keepdims=True) + self.eps)
        return lax.expand_dims(self.scale[...], _others(x.ndim, axis)) * x32.astype(x.dtype)


class Projection(nnx.Module):
    """`weight @ x + bias` over the first axes of `x`; the weight is `[*out, *into]`, the bias `[*out]`."""

    def __init__(
        self, out: tuple[int, ...], into: tuple[int, ...], *, bias: bool, dtype: str, rngs: nnx.Rngs
    ):
        self.inputs = len(into)
        weight = jax.random.normal(rngs.params(), out + into) * math.prod(into) ** -0.5
        self.weight = nnx.Param(weight.astype(dtype))
        self.bias = nnx.Param(jnp.zeros(out, dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...]
        y = jnp.tensordot(weight, x, axes=self.inputs)
        return y if self.bias is None else y + self.bias[...][..., None, None]


class Embedding(nnx.Module):
    """Token vectors, `[V, E]`, which are also the output projection of a tied model."""

    def __init__(self, vocab_size: int, size: int, *, dtype: str, rngs: nnx.Rngs):
        self.weight = nnx.Param(
            (jax.random.normal(rngs.params(), (vocab_size, size)) * size**-0.5).astype(dtype)
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`[B, T]` token ids to `[E, B, T]`."""
        return jnp.moveaxis(jnp.take(self.weight[...], tokens, axis=0), -1, 0)

    def logits(self, x: jax.Array) -> jax.Array:
        """`[E, B, T]` to float32 `[B, T, V]`."""
        y = jnp.tensordot(self.weight[...], x, axes=1, preferred_element_type=jnp.float32)
        return jnp.moveaxis(y, 0, -1)


class Attention(nnx.Module):
    """Grouped-query attention over the cache (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        heads = (c.num_kv_heads, c.queries_per_kv, c.head_size)
        # The queries of each kv head, its key and its value: one product, which may be sharded over kv heads.
        fused = (c.num_kv_heads, c.queries_per_kv + 2, c.head_size)
        self.qkv = Projection(fused, (c.hidden_size,), bias=c.qkv_bias, dtype=c.dtype, rngs=rngs)
        self.out = Projection((c.hidden_size,), heads, bias=c.out_bias, dtype=c.dtype, rngs=rngs)
        self.q_norm = Norm(c.head_size, c.norm_eps, c.dtype) if c.qk_norm else None
        self.k_norm = Norm(c.head_size, c.norm_eps, c.dtype) if c.qk_norm else None

    def __call__(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        mask: jax.Array,
        cache: LayerCache,
        start: jax.Array,
    ) -> tuple[jax.Array, LayerCache]:
        """Attends from `T` new tokens.

        Args:
          x: `[E, B, T]`.
          angles: cosines and sines, each `[H / 2, B, T]`.
          mask: `[B, 1, 1, T, S]` bool.
          cache: `k` `[B, K, H, S]` and `v` `[B, K, S, H]`.
          start: `[]` int32, the slot of the first new token.

        Returns:
          `[E, B, T]` and the cache with the new entries.
        """
        group = self.config.queries_per_kv
        qkv = self.qkv(x)  # [K, G + 2, H, B, T]
        q, k, v = qkv[:, :group], qkv[:, group], qkv[:, group + 1]
        if self.q_norm is not None:
            q, k = self.q_norm(q, axis=2), self.k_norm(k, axis=1)
        q, k = rotate(q, angles), rotate(k, angles)
        keys = write(cache["k"], jnp.transpose(k, (2, 0, 1, 3)), start, axis=3)
        values = write(cache["v"], jnp.transpose(v, (2, 0, 3, 1)), start, axis=2)
        q = jnp.transpose(q * self.config.head_size**-0.5, (3, 0, 1, 4, 2))  # [B, K, G, T, H]
        scores = jnp.einsum("bkgth,bkhs->bkgts", q, keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), axis=-1)
        mixed = jnp.einsum("bkgts,bksh->bkgth", weights.astype(values.dtype), values)
        return self.out(jnp.transpose(mixed, (1, 2, 4, 0, 3)).astype(x.dtype)), {"k": keys, "v": values}


class Mlp(nnx.Module):
    """Gated feed-forward (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = config
        shapes = {"bias": c.mlp_bias, "dtype": c.dtype, "rngs": rngs}
        self.gate_up = Projection((2, c.intermediate_size), (c.hidden_size,), **shapes)
        self.down = Projection((c.hidden_size,), (c.intermediate_size,), **shapes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[E, B, T]` to `[E, B, T]`."""
        gate, up = self.gate_up(x)
        return self.down(jax.nn.silu(gate) * up)


class Layer(nnx.Module):
    """One block."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = config
        self.attention_norm = Norm(c.hidden_size, c.norm_eps, c.dtype)
        self.attention = Attention(c, rngs=rngs)
        self.mlp_norm = Norm(c.hidden_size, c.norm_eps, c.dtype)
        self.mlp = Mlp(c, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        mask: jax.Array,
        cache: LayerCache,
        start: jax.Array,
    ) -> tuple[jax.Array, LayerCache]:
        """See `Attention`."""
        mixed, cache = self.attention(self.attention_norm(x), angles, mask, cache, start)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nnx.Module):
    """A decoder-only language model with a call of the `Model` contract.

    Args:
      config: shapes and options.
      rngs: for the initial weights, stream `params`.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=config.dtype, rngs=rngs)
        for i in range(config.num_layers):
            setattr(self, f"layer_{i}", Layer(config, rngs=rngs))
        self.norm = Norm(config.hidden_size, config.norm_eps, config.dtype)
        self.head = (
            None
            if config.tied
            else Embedding(config.vocab_size, config.hidden_size, dtype=config.dtype, rngs=rngs)
        )

    @property
    def vocab_size(self) -> int:
        """`V`."""
        return self.config.vocab_size

    @property
    def max_length(self) -> int | None:
        """The most positions."""
        return self.config.max_length

    def init_cache(self, batch: int, slots: int) -> Cache:
        """For each layer, keys `[B, K, H, S]` and values `[B, K, S, H]` of zeros."""
        c = self.config
        keys, values = (
            (batch, c.num_kv_heads, c.head_size, slots),
            (batch, c.num_kv_heads, slots, c.head_size),
        )
        return {
            f"layer_{i}": {"k": jnp.zeros(keys, c.dtype), "v": jnp.zeros(values, c.dtype)}
            for i in range(c.num_layers)
        }

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, mask: jax.Array, cache: Cache, start: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """See `Model.forward`. Returns float32 logits."""
        c = self.config
        angles = rotation(c.rope, c.head_size, positions)
        masks = {
            w: windowed(mask, positions, start, w)[:, None, None] for w in map(c.window, range(c.num_layers))
        }
        x, written = self.embed(tokens), {}
        for i in range(c.num_layers):
            name = f"layer_{i}"
            with jax.named_scope(name):
                x, written[name] = getattr(self, name)(x, angles, masks[c.window(i)], cache[name], start)
        with jax.named_scope("head"):
            head = self.embed if self.head is None else self.head
            return head.logits(self.norm(x)), written


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the halves of `x` `[..., H, B, T]` against each other, in float32."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-3)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-3)
    return rotated.astype(x.dtype)


def write(cache: jax.Array, new: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    """Writes `new` into the slots from `start` of `cache`.

    XLA on CPU takes a write of one slot for an operation on the cache alone, cheap enough to do twice where the result
    has two uses, and copies the whole cache for the second. So one slot is written as two, of which one is unchanged.
    """
    new = new.astype(cache.dtype)
    slots = cache.shape[axis]
    if new.shape[axis] > 1 or slots < 2:
        return lax.dynamic_update_slice_in_dim(cache, new, start, axis)
    first = jnp.minimum(start, slots - 2)
    old = lax.dynamic_slice_in_dim(cache, first, 2, axis)
    here = lax.broadcasted_iota(jnp.int32, old.shape, axis) + first == start
    return lax.dynamic_update_slice_in_dim(cache, jnp.where(here, new, old), first, axis)


def windowed(mask: jax.Array, positions: jax.Array, start: jax.Array, window: int | None) -> jax.Array:
    """Removes from `mask` `[B, T, S]` the slots whose position is `window` or more behind the query's.

    A slot below `start` holds the position of its own number, slot `start + t` holds `positions[:, t]`.
    """
    if window is None:
        return mask
    slots = jnp.broadcast_to(
        jnp.arange(mask.shape[-1], dtype=positions.dtype), (mask.shape[0], mask.shape[-1])
    )
    held = lax.dynamic_update_slice(slots, positions, (0, start))
    return mask & (positions[:, :, None] - held[:, None, :] < window)


def _others(ndim: int, axis: int) -> tuple[int, ...]:
    return tuple(i for i in range(ndim) if i != axis)
