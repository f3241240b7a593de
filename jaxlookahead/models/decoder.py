"""The built-in decoder: pre-norm blocks of grouped-query attention and gated feed-forward, as Flax nnx modules."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxlookahead.models.config import DecoderConfig
from jaxlookahead.models.layers import Embedding, Norm, Projection
from jaxlookahead.models.rope import rotation

__all__ = ["Decoder", "DecoderConfig"]


class View(NamedTuple):
    """Where the new tokens are and what they see, for one layer.

    Attributes:
      cos: `[B, T, H / 2]` cosines of the rotary angles.
      sin: `[B, T, H / 2]` sines.
      mask: `[B, T, S]` bool, the layer's window applied.
      start: `[]` int32, the slot of the first new token.
    """

    cos: jax.Array
    sin: jax.Array
    mask: jax.Array
    start: jax.Array


LayerCache = dict[str, jax.Array]
Cache = dict[str, LayerCache]


class Attention(nnx.Module):
    """Grouped-query attention over the cache (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        common = {"block": c.block or 0, "dtype": c.dtype, "rngs": rngs}
        # For each kv head its queries, its key and its value, in one product.
        fused = c.num_kv_heads * (c.queries_per_kv + 2) * c.head_size
        self.qkv = Projection(fused, c.hidden_size, bias=c.qkv_bias, **common)
        self.out = Projection(c.hidden_size, c.num_heads * c.head_size, bias=c.out_bias, **common)
        self.q_norm = Norm(c.head_size, c.norm_eps, c.dtype) if c.qk_norm else None
        self.k_norm = Norm(c.head_size, c.norm_eps, c.dtype) if c.qk_norm else None

    def __call__(self, x: jax.Array, view: View, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """Attends from `T` new tokens.

        Args:
          x: `[B, T, E]`.
          view: where the tokens are and what they see.
          cache: `k` `[B, K, H, S]` and `v` `[B, K, S, H]`.

        Returns:
          `[B, T, E]` and the cache with the new entries.
        """
        c, (b, t, _) = self.config, x.shape
        qkv = self.qkv(x).reshape(b, t, c.num_kv_heads, c.queries_per_kv + 2, c.head_size)
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (
            rotate(q, view.cos[:, :, None, None], view.sin[:, :, None, None]),
            rotate(k, view.cos[:, :, None], view.sin[:, :, None]),
        )
        keys = write(cache["k"], jnp.transpose(k, (0, 2, 3, 1)), view.start, axis=3)
        values = write(cache["v"], jnp.transpose(v, (0, 2, 1, 3)), view.start, axis=2)
        q = jnp.transpose(q * c.head_size**-0.5, (0, 2, 3, 1, 4))
        scores = jnp.einsum("bkgth,bkhs->bkgts", q, keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(view.mask[:, None, None], scores, jnp.finfo(jnp.float32).min), axis=-1)
        mixed = jnp.einsum("bkgts,bksh->bkgth", weights.astype(values.dtype), values)
        mixed = jnp.transpose(mixed, (0, 3, 1, 2, 4)).reshape(b, t, -1)
        return self.out(mixed.astype(x.dtype)), {"k": keys, "v": values}


class Mlp(nnx.Module):
    """Gated feed-forward (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = config
        common = {"bias": c.mlp_bias, "block": c.block or 0, "dtype": c.dtype, "rngs": rngs}
        self.gate_up = Projection(2 * c.intermediate_size, c.hidden_size, **common)
        self.down = Projection(c.hidden_size, c.intermediate_size, **common)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, E]` to `[B, T, E]`."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        # silu(gate) * up, with the division last: XLA on CPU fuses anything cheaper into the copies that a blocked
        # product makes of its input, and computes it anew for each. The bound keeps the gradient finite.
        return self.down(gate * up / (1 + jnp.exp(-jnp.maximum(gate, -80))))


class Layer(nnx.Module):
    """One block."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = config
        self.attention_norm = Norm(c.hidden_size, c.norm_eps, c.dtype)
        self.attention = Attention(c, rngs=rngs)
        self.mlp_norm = Norm(c.hidden_size, c.norm_eps, c.dtype)
        self.mlp = Mlp(c, rngs=rngs)

    def __call__(self, x: jax.Array, view: View, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """See `Attention`."""
        mixed, cache = self.attention(self.attention_norm(x), view, cache)
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
        c, shape = config, (config.vocab_size, config.hidden_size)
        # Where the embedding has no product to serve, whole vectors side by side are the better layout.
        self.embed = Embedding(*shape, block=(c.block or 0) if c.tied else 0, dtype=c.dtype, rngs=rngs)
        for i in range(c.num_layers):
            setattr(self, f"layer_{i}", Layer(c, rngs=rngs))
        self.norm = Norm(c.hidden_size, c.norm_eps, c.dtype)
        self.head = None if c.tied else Embedding(*shape, block=c.block or 0, dtype=c.dtype, rngs=rngs)

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
            f"layer_{i}": {"k": jnp.zeros(keys, c.dtype), "v": jnp.zeros(values, c.dtype)} for i in range(c.num_layers)
        }

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, mask: jax.Array, cache: Cache, start: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """See `Model.forward`. Returns float32 logits."""
        c = self.config
        cos, sin = rotation(c.rope, c.head_size, positions)
        views = {
            w: View(cos, sin, windowed(mask, positions, start, w), start) for w in map(c.window, range(c.num_layers))
        }
        x, written = self.embed(tokens), {}
        for i in range(c.num_layers):
            name = f"layer_{i}"
            with jax.named_scope(name):
                x, written[name] = getattr(self, name)(x, views[c.window(i)], cache[name])
        with jax.named_scope("head"):
            head = self.embed if self.head is None else self.head
            return head.logits(self.norm(x)), written


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the halves of `x` `[..., H]` against each other, in float32; `cos` and `sin` are `[..., H / 2]`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


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
    slots = jnp.broadcast_to(jnp.arange(mask.shape[-1], dtype=positions.dtype), (mask.shape[0], mask.shape[-1]))
    held = lax.dynamic_update_slice(slots, positions, (0, start))
    return mask & (positions[:, :, None] - held[:, None, :] < window)
