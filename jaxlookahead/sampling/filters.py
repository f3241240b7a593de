"""Temperature, top-k, top-p and min-p, without sorting the vocabulary.

Each filter keeps the tokens at or above a threshold, and each threshold is the smallest logit for which a
monotone condition holds. Floats order like integers once their sign is folded, so 32 halvings over bit
patterns find it exactly; each costs one pass over the vocabulary. On a CPU that is about thirty times faster
than a sort.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxlookahead.sampling.arrays import SamplingArrays

_MAGNITUDE = 0x7FFFFFFF


def _to_key(value: jax.Array) -> jax.Array:
    """Maps float32 to int32 with the same order."""
    word = lax.bitcast_convert_type(value, jnp.int32)
    return jnp.where(word >= 0, word, word ^ _MAGNITUDE)


def _from_key(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.where(key >= 0, key, key ^ _MAGNITUDE), jnp.float32)


def _smallest(condition: Callable[[jax.Array], jax.Array], upper: jax.Array) -> jax.Array:
    """Finds the smallest float32 for which a condition holds.

    Args:
      condition: maps `[B, 1]` float32 to `[B, 1]` bool, False below a threshold and True from it on.
      upper: `[B, 1]` float32 for which the condition holds.

    Returns:
      `[B, 1]` float32.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)
        holds = condition(_from_key(middle))
        return jnp.where(holds, low, middle + 1), jnp.where(holds, middle, high)

    low = jnp.full(upper.shape, _to_key(jnp.float32(-jnp.inf)))
    return _from_key(lax.fori_loop(0, 32, halve, (low, jnp.maximum(_to_key(upper), low)))[1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cut:
    """Where the filters cut, `[B, 1]` float32 each.

    Attributes:
      top_k: the smallest logit that top-k keeps.
      tail: the mass, relative to the most probable token, that top-p may cut off.
      min_p: the smallest logit that min-p keeps.
      lowest: the smallest logit that all of them keep.
    """

    top_k: jax.Array
    tail: jax.Array
    min_p: jax.Array
    lowest: jax.Array


def _mass_upto(logits: jax.Array, top: jax.Array, least: jax.Array, most: jax.Array) -> jax.Array:
    inside = (logits >= least) & (logits <= most)
    return jnp.sum(jnp.where(inside, jnp.exp(logits - top), 0), axis=-1, keepdims=True)


def _find_cut(arrays: SamplingArrays, logits: jax.Array) -> Cut:
    sampled = (arrays.temperature > 0)[:, None]
    top = jnp.max(logits, axis=-1, keepdims=True)
    nothing = jnp.full(top.shape, -jnp.inf, jnp.float32)

    def find_top_k() -> jax.Array:
        k = arrays.top_k[:, None]
        kth = _smallest(lambda at: jnp.sum(logits > at, axis=-1, keepdims=True) < k, top)
        return jnp.where(sampled & (k > 0), kth, nothing)

    top_k = lax.cond((sampled[:, 0] & (arrays.top_k > 0)).any(), find_top_k, lambda: nothing)

    def find_top_p() -> tuple[jax.Array, jax.Array]:
        weights = jnp.where(logits >= top_k, jnp.exp(logits - top), 0)
        tail = arrays.top_p_tail[:, None] * jnp.sum(weights, axis=-1, keepdims=True)

        def exceeds(at: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(logits <= at, weights, 0), axis=-1, keepdims=True) > tail

        used = sampled & (tail > 0)
        return jnp.where(used, _smallest(exceeds, top), nothing), jnp.where(used, tail, 0)

    top_p, tail = lax.cond(
        (sampled[:, 0] & (arrays.top_p_tail > 0)).any(), find_top_p, lambda: (nothing, jnp.zeros_like(top))
    )
    min_p = jnp.where(sampled, top + jnp.log(arrays.min_p[:, None]), nothing)
    return Cut(top_k, tail, min_p, jnp.maximum(jnp.maximum(top_k, top_p), min_p))


def apply_filters(arrays: SamplingArrays, logits: jax.Array) -> tuple[jax.Array, jax.Array, Cut]:
    """Applies temperature, then top-k, top-p and min-p, to the rows that sample; greedy rows pass through.

    The most probable token is always kept. Each filter works on what the one before has left, as in
    `transformers`.

    Args:
      arrays: settings of `B` rows.
      logits: `[B, V]` float32, after `apply_processors`.

    Returns:
      `[B, V]` float32 after temperature, the same with -inf for removed tokens, and the cut.
    """
    temperature = arrays.temperature[:, None]
    scaled = jnp.where(temperature > 0, logits / jnp.where(temperature > 0, temperature, 1), logits)

    def cut_off() -> tuple[jax.Array, Cut]:
        cut = _find_cut(arrays, scaled)
        return jnp.where(scaled >= cut.lowest, scaled, -jnp.inf), cut

    def keep_all() -> tuple[jax.Array, Cut]:
        nothing = jnp.full((logits.shape[0], 1), -jnp.inf, jnp.float32)
        return scaled, Cut(nothing, jnp.zeros_like(nothing), nothing, nothing)

    filtered, cut = lax.cond(is_filtered(arrays).any(), cut_off, keep_all)
    return scaled, filtered, cut


def is_filtered(arrays: SamplingArrays) -> jax.Array:
    """`[B]` bool: rows that sample from a part of the vocabulary."""
    some = (arrays.top_k > 0) | (arrays.top_p_tail > 0) | (arrays.min_p > 0)
    return some & (arrays.temperature > 0)


def boundary_distance(
    arrays: SamplingArrays, scaled: jax.Array, cut: Cut, score: jax.Array, token: jax.Array
) -> jax.Array:
    """Says how near the filters were to making another token win.

    Two things could: the winner falls out, or a removed token with a higher score comes in. Distances are in
    logits for top-k, min-p and for an exchange of neighbours, and in probability mass for top-p, which moves
    by less than the logits do.

    Args:
      arrays: settings of `B` rows.
      scaled: `[B, V]` float32, logits after temperature, nothing removed.
      cut: from `apply_filters`.
      score: `[B, V]` float32, `scaled` with noise.
      token: `[B, 1]` int32, the winner.

    Returns:
      `[B]` float32, inf where no filter is on or near.
    """
    winner = lax.broadcasted_iota(jnp.int32, scaled.shape, 1) == token
    kept = scaled >= cut.lowest
    top = jnp.max(scaled, axis=-1, keepdims=True)

    def largest(where: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(where, values, -jnp.inf), axis=-1, keepdims=True)

    win = largest(winner, scaled)
    rival = largest(~kept & (score > largest(winner, score)), scaled)
    lowest_kept = -largest(kept, -scaled)
    highest_removed = largest(~kept, scaled)

    # Neighbours that exchange places change what top-k and top-p keep, but not what min-p keeps.
    ranked = (arrays.top_k > 0)[:, None] | (cut.tail > 0)

    def slack(logit: jax.Array) -> jax.Array:
        total = _mass_upto(scaled, top, cut.top_k, top)
        by_mass = jnp.abs(_mass_upto(scaled, top, cut.top_k, logit) - cut.tail) / total
        return jnp.minimum(jnp.where(cut.tail > 0, by_mass, jnp.inf), jnp.abs(logit - cut.min_p))

    # The most probable token can't fall out, so its distance counts only as an exchange with a neighbour.
    out = jnp.where(ranked, win - highest_removed, jnp.inf)
    leaving = jnp.minimum(out, jnp.where(win < top, slack(win), jnp.inf))
    exchange = jnp.where(ranked, lowest_kept - rival, jnp.inf)
    entering = jnp.where(rival > -jnp.inf, jnp.minimum(exchange, slack(rival)), jnp.inf)
    distance = jnp.minimum(leaving, entering)[:, 0]
    return jnp.where(is_filtered(arrays), distance, jnp.inf)
