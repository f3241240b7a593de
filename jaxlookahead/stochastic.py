"""Accept rules for drafts that a draft model sampled.

Two ways to use a draft model that samples:

* *Coupled*: the draft is drawn with the noise that the target will use (`coupled_children`). The ordinary
  walk verifies it, token by token the output is that of plain decoding, whatever the draft model is.
* *Rejection*: `verify_children` accepts a child with probability `min(1, p / q)` (Leviathan et al. 2022,
  "Fast inference from transformers via speculative decoding", Algorithm 1). The output has the target's
  distribution, but its tokens depend on the drafts. For one child no rule accepts more often.

All functions are pure and work on one node; `jax.vmap` them over rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxlookahead.sampling.noise import gumbel, token_noise, uniform


class Verdict(NamedTuple):
    """What a node emits.

    Attributes:
      token: int32, the emitted token.
      child: int32, the index of the child that holds it and was accepted, -1 where all were rejected.
    """

    token: jax.Array
    child: jax.Array


def is_accepted(u: jax.Array, p: jax.Array, q: jax.Array, lenience: float | jax.Array = 1.0) -> jax.Array:
    """Whether a token drawn from `q` passes: `u < p / (lenience q)`, strictly, so that `p = 0` never does.

    Args:
      u: uniform in `[0, 1)`.
      p: the target's probability of the token.
      q: the draft's.
      lenience: 1 is lossless; see `verify_children`.
    """
    return u * (lenience * q) < p


def normalise(weights: jax.Array, otherwise: jax.Array) -> jax.Array:
    """Scales `[V]` weights to sum to 1; `otherwise` where their sum is 0."""
    total = jnp.sum(weights)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), otherwise)


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """The target's distribution after a token drawn from `q` was rejected: `(p - q)+`, normalised.

    Where `q` covers `p` wholly nothing is ever rejected but by rounding, and the answer is `p`.

    Args:
      p: `[V]` probabilities.
      q: `[V]` probabilities.
    """
    return normalise(jnp.maximum(p - q, 0), p)


def _draw(p: jax.Array, noise: jax.Array) -> jax.Array:
    return jnp.argmax(jnp.log(p) + noise).astype(jnp.int32)


def verify_children(
    key: jax.Array,
    p: jax.Array,
    tokens: jax.Array,
    q: jax.Array,
    sampled: jax.Array,
    *,
    lenience: float | jax.Array = 1.0,
) -> Verdict:
    """Decides at one node: accepts the first child that passes, or draws from what is left of the target.

    Children are tried in order. A sampled child `x` passes with probability `min(1, p(x) / q(x))`; a
    rejection leaves `(p - q)+`, and the next sampled child came from `q` without `x` (recursive rejection
    without replacement, as in SpecInfer, Miao et al. 2023, and Sequoia, Chen et al. 2024). A fixed child
    passes with probability `p(x)`; a rejection leaves `p` without `x`. Either way the emitted token is
    distributed as `p`. Without children it is drawn from `p`: the bonus token of Algorithm 1.

    *Lenience* below 1 trades exactness for acceptance (Leviathan et al. 2022, appendix A.5): `q` is
    multiplied by it in the comparison, and no token is emitted with more than `1 / lenience` times its
    probability.

    Args:
      key: `[2]` uint32 of this node, from `stream_key(..., Stream.ACCEPT)`.
      p: `[V]` float32, the target's processed probabilities. One-hot for greedy decoding.
      tokens: `[C]` int32 children, no token twice, -1 where there is none.
      q: `[V]` float32, the distribution that the first sampled child was drawn from, *after* all processing,
        as `draw_children` takes it.
      sampled: `[C]` bool, True for children drawn from `q`, False for fixed ones. A fixed child may depend on
        the children before it, not on those after it; a sampled one must not be drawn again once it is a
        child.
      lenience: in (0, 1]; anything but 1 changes the distribution of the output.

    Returns:
      `Verdict` of scalars.
    """
    count, size = tokens.shape[0], p.shape[0]
    vocabulary = jnp.arange(size)
    p, q = p.astype(jnp.float32), q.astype(jnp.float32)

    def visit(carry: tuple[Any, ...], child: tuple[jax.Array, ...]) -> tuple[tuple[Any, ...], None]:
        p, q, verdict_token, verdict_child = carry
        index, token, drawn, u = child
        here = vocabulary == token
        chance = jnp.where(drawn, jnp.sum(jnp.where(here, q, 0)), 1)
        tried = (token >= 0) & (verdict_child < 0)
        passed = tried & is_accepted(u, jnp.sum(jnp.where(here, p, 0)), chance, lenience)
        left = jnp.where(drawn, residual(p, q), normalise(jnp.where(here, 0, p), p))
        p = jnp.where(tried & ~passed, left, p)
        q = jnp.where(tried, normalise(jnp.where(here, 0, q), jnp.zeros_like(q)), q)
        verdict = jnp.where(passed, token, verdict_token), jnp.where(passed, index, verdict_child)
        return (p, q, *verdict), None

    start: tuple[Any, ...] = (p, q, jnp.int32(-1), jnp.int32(-1))
    children: tuple[jax.Array, ...] = (
        jnp.arange(count, dtype=jnp.int32),
        tokens.astype(jnp.int32),
        sampled,
        uniform(key, count),
    )
    (p, _, token, child), _ = lax.scan(visit, start, children)
    return Verdict(jnp.where(child < 0, _draw(p, gumbel(key, size, offset=count)), token), child)


def verify_chain(
    keys: jax.Array, p: jax.Array, tokens: jax.Array, q: jax.Array, *, lenience: float | jax.Array = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Verifies a chain of sampled tokens (Leviathan et al. 2022, Algorithm 1).

    Args:
      keys: `[D + 1, 2]` uint32, one per position, from `stream_key(..., Stream.ACCEPT)`.
      p: `[D + 1, V]` float32, the target's probabilities after each prefix of the chain, the empty one first.
      tokens: `[D]` int32, -1 after the end of a shorter chain.
      q: `[D, V]` float32, what each token was drawn from.
      lenience: see `verify_children`.

    Returns:
      `[D + 1]` int32 emitted tokens, -1 after the last, and their number, 1 to `D + 1`.
    """
    tokens = jnp.append(tokens.astype(jnp.int32), -1)
    q = jnp.concatenate([q, jnp.zeros_like(q[:1])])

    def node(key: jax.Array, p: jax.Array, token: jax.Array, q: jax.Array) -> Verdict:
        return verify_children(key, p, token[None], q, jnp.ones(1, bool), lenience=lenience)

    verdicts = jax.vmap(node)(keys, p, tokens, q)
    count = 1 + jnp.sum(jnp.cumprod(verdicts.child >= 0))
    return jnp.where(jnp.arange(tokens.shape[0]) < count, verdicts.token, -1), count


def draw_children(key: jax.Array, q: jax.Array, count: int, *, exclude: jax.Array | None = None) -> jax.Array:
    """Draws children from a draft distribution without replacement, in the order that `verify_children`
    needs.

    Args:
      key: `[2]` uint32 of this node, from `stream_key(..., Stream.DRAFT)`.
      q: `[V]` float32 probabilities after all processing of the draft.
      count: `C`, static.
      exclude: `[E]` int32 tokens that are children already, -1 where unused.

    Returns:
      `[C]` int32; -1 where fewer than `C` tokens have a positive probability.
    """
    if exclude is not None:
        q = jnp.where((jnp.arange(q.shape[0])[:, None] == exclude).any(1), 0, q)
    return largest(jnp.log(q.astype(jnp.float32)) + gumbel(key, q.shape[0]), count)


def coupled_children(
    seed: jax.Array, request: jax.Array, position: jax.Array, logits: jax.Array, count: int = 1
) -> jax.Array:
    """Drafts with the noise that the target will use for the same token.

    The first child is the draft model's own sample; it equals the target's token the more often the nearer
    the two distributions are (`coupled_acceptance`), and always where they are the same.

    Args:
      seed: `[2]` uint32, as in `SamplingArrays.seed`.
      request: `[]` int32.
      position: `[]` int32, the output index of the drafted token.
      logits: `[V]` float32 of the draft, processed as the target's will be, temperature included.
      count: `C`, static; more children are the runners-up.

    Returns:
      `[C]` int32; -1 where fewer than `C` tokens are left.
    """
    noise = token_noise(seed, request, position, logits.shape[-1])
    return largest(logits.astype(jnp.float32) + noise, count)


def largest(scores: jax.Array, count: int) -> jax.Array:
    values, tokens = lax.top_k(scores, min(count, scores.shape[0]))
    tokens = jnp.where(values > -jnp.inf, tokens, -1).astype(jnp.int32)
    return jnp.pad(tokens, (0, count - tokens.shape[0]), constant_values=-1)


def rejection_acceptance(p: jax.Array, q: jax.Array, lenience: float = 1.0) -> jax.Array:
    """Probability that one sampled child is accepted: the sum of `min(q, p / lenience)`.

    Leviathan et al. 2022, theorem 3.5, and appendix A.5 for the lenience.

    Args:
      p: `[V]` probabilities of the target.
      q: `[V]` probabilities of the draft.
      lenience: in (0, 1].
    """
    return jnp.sum(jnp.minimum(q, p / lenience))


def lenient_distribution(p: jax.Array, q: jax.Array, lenience: float) -> jax.Array:
    """Distribution of the token emitted with one sampled child: `min(q, p / lenience)` and the rest by the
    residual.

    Args:
      p: `[V]` probabilities of the target.
      q: `[V]` probabilities of the draft.
      lenience: in (0, 1]; 1 gives `p`.
    """
    return jnp.minimum(q, p / lenience) + (1 - rejection_acceptance(p, q, lenience)) * residual(p, q)


def coupled_acceptance(p: jax.Array, q: jax.Array) -> jax.Array:
    """Probability that a coupled draft equals the target's token: the sum over x of `1 / sum_y max(p_y/p_x,
    q_y/q_x)`.

    The tokens are the winners of two races with the same exponential clocks, at rates `p` and `q` (Daliri et
    al. 2024, "Coupling without communication and drafter-invariant speculative decoding").

    Args:
      p: `[V]` probabilities of the target.
      q: `[V]` probabilities of the draft.
    """
    both = (p > 0) & (q > 0)
    rates = jnp.maximum(p / jnp.where(both, p, 1)[:, None], q / jnp.where(both, q, 1)[:, None])
    return jnp.sum(jnp.where(both, 1 / jnp.sum(rates, axis=1), 0))
