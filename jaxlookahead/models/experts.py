"""Mixture of experts: a router sends each token through a few of many feed-forwards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxlookahead.models.config import DecoderConfig
from jaxlookahead.models.layers import Projection, activate, in_turns


class Experts(nnx.Module):
    """Gated feed-forwards, of which a router chooses some for each token (Shazeer et al. 2017, section 2.1,
    https://arxiv.org/abs/1701.06538; without noise).

    Attributes:
      router: from the stream to one score an expert.
      gate_up: `[experts, 2 F, E]`.
      down: `[experts, E, F]`.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        self.router = Projection(c.num_experts, c.hidden_size, bias=False, block=0, dtype=c.dtype, rngs=rngs)

        def weight(out: int, into: int) -> nnx.Param[jax.Array]:
            draw = jax.random.normal(rngs.params(), (c.num_experts, out, into)) * into**-0.5
            return nnx.Param(draw.astype(c.dtype))

        self.gate_up = weight(2 * c.expert_size, c.hidden_size)
        self.down = weight(c.hidden_size, c.expert_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, E]` to `[B, T, E]`."""
        c = self.config
        scores = jax.nn.softmax(self.router(x).astype(jnp.float32), axis=-1)
        shares, chosen = lax.top_k(scores, c.experts_per_token)
        if c.normalize_experts:
            shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
        rows, shares = x.reshape(-1, x.shape[-1]), shares.reshape(-1, c.experts_per_token)
        chosen = chosen.reshape(shares.shape)
        # Copies of the chosen experts' weights are written and read once more.
        if 3 * chosen.size <= c.num_experts:
            return self._gathered(rows, shares, chosen).reshape(x.shape)
        dense = jnp.sum(jax.nn.one_hot(chosen, c.num_experts) * shares[..., None], axis=-2)
        both = jnp.concatenate([rows.astype(jnp.float32), dense], axis=-1)
        return in_turns(lambda part: self._all(part, x.dtype), both).reshape(x.shape)

    def _gathered(self, rows: jax.Array, shares: jax.Array, chosen: jax.Array) -> jax.Array:
        """Reads the weights of the chosen experts only: cheaper for few tokens."""
        hidden = jnp.einsum("nkfe,ne->nkf", self.gate_up[...][chosen], rows)
        hidden = activate(self.config.activation, *jnp.split(hidden, 2, axis=-1))
        out = jnp.einsum("nkef,nkf->nke", self.down[...][chosen], hidden)
        return jnp.sum(out * shares[..., None].astype(out.dtype), axis=1)

    def _all(self, both: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Sends every token through every expert and weighs with zero those not chosen.

        Args:
          both: `[N, E + experts]` float32, the stream and the experts' shares.
          dtype: of the products.
        """
        rows, shares = both[:, : -self.config.num_experts].astype(dtype), both[:, -self.config.num_experts :]
        hidden = jnp.einsum("xfe,ne->xnf", self.gate_up[...], rows)
        hidden = activate(self.config.activation, *jnp.split(hidden, 2, axis=-1))
        hidden = hidden * shares.T[..., None].astype(dtype)
        return jnp.einsum("xef,xnf->ne", self.down[...], hidden)
