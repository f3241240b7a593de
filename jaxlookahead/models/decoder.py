"""The built-in decoder: blocks of grouped-query attention and feed-forward, as Flax nnx modules."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxlookahead.models.config import DecoderConfig
from jaxlookahead.models.experts import Experts
from jaxlookahead.models.layers import Embedding, Norm, Projection, activate
from jaxlookahead.models.rope import rotation

__all__ = ["Decoder", "DecoderConfig"]


class View(NamedTuple):
    """Where the new tokens are and what they see, for one layer.

    Attributes:
      cos: `[B, T, R / 2]` cosines of the rotary angles of the `R` dimensions that rotate; None: nothing rotates.
      sin: `[B, T, R / 2]` sines.
      mask: `[B, T, S]` bool, the layer's window applied.
      start: `[]` int32, the slot of the first new token.
    """

    cos: jax.Array | None
    sin: jax.Array | None
    mask: jax.Array
    start: jax.Array


LayerCache = dict[str, jax.Array]
Cache = dict[str, LayerCache]


class Attention(nnx.Module):
    """Grouped-query attention over the cache (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        common: dict[str, Any] = {"block": c.block or 0, "dtype": c.dtype, "rngs": rngs}
        # For each kv head its queries, its key and its value, in one product.
        fused = c.num_kv_heads * (c.queries_per_kv + 2) * c.head_size
        self.qkv = Projection(fused, c.hidden_size, bias=c.qkv_bias, **common)
        self.out = Projection(c.hidden_size, c.num_heads * c.head_size, bias=c.out_bias, **common)
        heads = (c.num_heads, c.num_kv_heads) if c.qk_norm_whole else (1, 1)
        self.q_norm, self.k_norm = (_norm(c, n * c.head_size) if c.qk_norm else None for n in heads)

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
        if self.q_norm is not None and self.k_norm is not None:
            whole = (b, t, -1)
            q, k = (
                norm(x.reshape(whole) if c.qk_norm_whole else x).reshape(x.shape)
                for norm, x in ((self.q_norm, q), (self.k_norm, k))
            )
        if view.cos is not None and view.sin is not None:
            q, k = (
                rotate(q, view.cos[:, :, None, None], view.sin[:, :, None, None]),
                rotate(k, view.cos[:, :, None], view.sin[:, :, None]),
            )
        keys = write(cache["k"], jnp.transpose(k, (0, 2, 3, 1)), view.start, axis=3)
        values = write(cache["v"], jnp.transpose(v, (0, 2, 1, 3)), view.start, axis=2)
        scale = c.head_size**-0.5 if c.attention_scale is None else c.attention_scale
        q = jnp.transpose(q * scale, (0, 2, 3, 1, 4))
        scores = jnp.einsum("bkgth,bkhs->bkgts", q, keys, preferred_element_type=jnp.float32)
        scores = capped(scores, c.attention_cap)
        weights = jax.nn.softmax(jnp.where(view.mask[:, None, None], scores, jnp.finfo(jnp.float32).min), axis=-1)
        mixed = jnp.einsum("bkgts,bksh->bkgth", weights.astype(values.dtype), values)
        mixed = jnp.transpose(mixed, (0, 3, 1, 2, 4)).reshape(b, t, -1)
        return self.out(mixed.astype(x.dtype)), {"k": keys, "v": values}


class Mlp(nnx.Module):
    """Feed-forward, gated (Shazeer 2020, https://arxiv.org/abs/2002.05202) or not."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = config
        common: dict[str, Any] = {"bias": c.mlp_bias, "block": c.block or 0, "dtype": c.dtype, "rngs": rngs}
        self.activation, self.gated = c.activation, c.gated
        if c.gated:
            self.gate_up = Projection(2 * c.intermediate_size, c.hidden_size, **common)
        else:
            self.up = Projection(c.intermediate_size, c.hidden_size, **common)
        self.down = Projection(c.hidden_size, c.intermediate_size, **common)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, E]` to `[B, T, E]`."""
        if not self.gated:
            return self.down(activate(self.activation, self.up(x)))
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(activate(self.activation, gate, up))


class Layer(nnx.Module):
    """One block."""

    def __init__(self, config: DecoderConfig, index: int, *, rngs: nnx.Rngs):
        c = config
        self.order = c.norm_order
        before, after = c.norm_order != "after", c.norm_order in ("after", "both")
        self.attention_norm = _norm(c) if before else None
        self.attention = Attention(c, rngs=rngs)
        self.attention_post_norm = _norm(c) if after else None
        self.mlp_norm = _norm(c) if before else None
        self.mlp = Experts(c, rngs=rngs) if c.has_experts(index) else Mlp(c, rngs=rngs)
        self.mlp_post_norm = _norm(c) if after else None

    def __call__(self, x: jax.Array, view: View, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """See `Attention`."""
        mixed, cache = self.attention(self._before(x, self.attention_norm), view, cache)
        if self.order == "parallel":
            return x + mixed + self.mlp(self._before(x, self.mlp_norm)), cache
        x = self._add(x, mixed, self.attention_norm, self.attention_post_norm)
        return self._add(x, self.mlp(self._before(x, self.mlp_norm)), self.mlp_norm, self.mlp_post_norm), cache

    def _before(self, x: jax.Array, norm: Norm | None) -> jax.Array:
        return x if norm is None or self.order == "residual" else norm(x)

    def _add(self, x: jax.Array, y: jax.Array, norm: Norm | None, post_norm: Norm | None) -> jax.Array:
        x = x + (y if post_norm is None else post_norm(y))
        return norm(x) if norm is not None and self.order == "residual" else x


class Decoder(nnx.Module):
    """A decoder-only language model with a call of the `Model` contract.

    Args:
      config: shapes and options.
      rngs: for the initial weights, stream `params`.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        c, shape = config, (config.vocab_size, config.embed_width)
        # Where the embedding has no product to serve, whole vectors side by side are the better layout.
        self.embed = Embedding(*shape, block=(c.block or 0) if c.tied else 0, dtype=c.dtype, rngs=rngs)
        for i in range(c.num_layers):
            setattr(self, f"layer_{i}", Layer(c, i, rngs=rngs))
        self.norm = _norm(c) if c.final_norm else None
        table: dict[str, Any] = {"block": 0, "dtype": c.dtype, "rngs": rngs}
        self.positions = Embedding(c.learned_positions, c.hidden_size, **table) if c.learned_positions else None
        common: dict[str, Any] = {"bias": False, "block": c.block or 0, "dtype": c.dtype, "rngs": rngs}
        narrow = c.embed_width != c.hidden_size
        self.project_in = Projection(c.hidden_size, c.embed_width, **common) if narrow else None
        self.project_out = Projection(c.embed_width, c.hidden_size, **common) if narrow else None
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
        views = {
            w: self._view(positions, windowed(mask, positions, start, w), start, w)
            for w in map(c.window, range(c.num_layers))
        }
        x, written = self._embedded(tokens, positions), {}
        for i in range(c.num_layers):
            name = f"layer_{i}"
            with jax.named_scope(name):
                x, written[name] = getattr(self, name)(x, views[c.window(i)], cache[name])
        with jax.named_scope("head"):
            x = x if self.norm is None else self.norm(x)
            x = x if self.project_out is None else self.project_out(x)
            head = self.embed if self.head is None else self.head
            return capped(head.logits(x), c.logit_cap), written

    def _view(self, positions: jax.Array, mask: jax.Array, start: jax.Array, window: int | None) -> View:
        c = self.config
        rope = c.rope if window is None or c.rope_local is None else c.rope_local
        cos, sin = (None, None) if rope is None else rotation(rope, c.rotated, positions)
        return View(cos, sin, mask, start)

    def _embedded(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        c, x = self.config, self.embed(tokens)
        x = x if c.embed_scale == 1 else x * jnp.asarray(c.embed_scale, x.dtype)
        x = x if self.project_in is None else self.project_in(x)
        if self.positions is not None:
            # Padding may lie beyond the table; it must not become NaN, which a mask does not hide.
            x = x + self.positions(jnp.minimum(positions + c.position_offset, c.learned_positions - 1))
        return x


def _norm(c: DecoderConfig, size: int | None = None) -> Norm:
    return Norm(c.hidden_size if size is None else size, c.norm_eps, c.dtype, c.norm)


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """`cap * tanh(x / cap)`, near `x` where it is small and never beyond `cap`."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the halves of the first `R` entries of `x` `[..., H]` against each other, in float32.

    `cos` and `sin` are `[..., R / 2]`; the other entries stay.
    """
    size = 2 * cos.shape[-1]
    if size < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :size], cos, sin), x[..., size:]], axis=-1)
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
