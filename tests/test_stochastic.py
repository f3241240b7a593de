"""Accept rules: single cases by hand, and the law of what they emit against exact distributions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlookahead.sampling import Stream, stream_key, token_noise
from jaxlookahead.stochastic import (
    coupled_acceptance,
    coupled_children,
    draw_children,
    is_accepted,
    lenient_distribution,
    rejection_acceptance,
    residual,
    verify_chain,
    verify_children,
)

V, LEVELS, MOST = 10, 4, 8
DRAWS = 200_000
SEED = jnp.array([5, 0], jnp.uint32)


def _chi_square(counts, p):
    """Standardised chi-square statistic, cells expected fewer than 5 times taken together."""
    assert counts[p == 0].sum() == 0
    want = p * counts.sum()
    small = want < 5
    counts = np.append(counts[~small], counts[small].sum())
    want = np.append(want[~small], want[small].sum())
    counts, want = counts[want > 0], want[want > 0]
    if len(want) == 1:
        return 0.0
    return (((counts - want) ** 2 / want).sum() - (len(want) - 1)) / (2 * (len(want) - 1)) ** 0.5


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _tables(kind):
    """Target and draft distributions `[LEVELS, V, V]` of the token at a level, given the one before it."""
    rng = np.random.default_rng(3)
    shape = LEVELS, V, V
    p, q = (_softmax(rng.normal(size=shape) * 1.5) for _ in range(2))
    if kind == "zeros":
        p *= rng.random(shape) < 0.5
        p[..., 0] += 0.05
    elif kind == "equal":
        q = p.copy()
    elif kind == "disjoint":
        half = (np.arange(V) + np.arange(LEVELS * V).reshape(LEVELS, V, 1)) % 2 == 0
        p, q = p * half, q * ~half
    elif kind == "one-hot":
        p = 1e-3 * p + np.eye(V)[rng.integers(0, V, shape[:2])]
        q = 0.05 * q + np.eye(V)[rng.integers(0, V, shape[:2])]
    return tuple((t / t.sum(-1, keepdims=True)).astype(np.float32) for t in (p, q))


def _children(rule, request, level, q, allowed):
    """Children of one node and which of them are sampled; `allowed` of the `MOST` places are used."""
    key = stream_key(SEED, request, level, Stream.DRAFT)
    used = jnp.arange(MOST) < allowed
    if rule == "sampled":
        tokens, sampled = draw_children(key, q, MOST), used
    elif rule == "fixed":
        tokens, sampled = jax.lax.top_k(q, MOST)[1], jnp.zeros(MOST, bool)
    else:
        # Two fixed children first, then sampled ones.
        fixed = jnp.array([1, 4])
        tokens = jnp.concatenate([fixed, draw_children(key, q, MOST - 2, exclude=fixed)])
        sampled = jnp.arange(MOST) >= 2
    return jnp.where(used, tokens, -1), sampled


@functools.partial(jax.jit, static_argnames=("rule", "block"))
def _emit(p, q, allowed, rule, lenience=1.0, block=50_000):
    """Emits `LEVELS` tokens by trees of depth 3: `[DRAWS, LEVELS]` tokens and accepted children.

    Children are drawn when the walk comes to their node, which has the law of drawing the whole tree first.
    """

    def sequence(request):
        def level(carry, at):
            before, depth = carry
            children, sampled = _children(rule, request, at, q[at, before], jnp.where(depth < 3, allowed, 0))
            key = stream_key(SEED, request, at, Stream.ACCEPT)
            token, child = verify_children(key, p[at, before], children, q[at, before], sampled, lenience=lenience)
            return (token, jnp.where(child < 0, 0, depth + 1)), (token, child)

        return jax.lax.scan(level, (jnp.int32(0), jnp.int32(0)), jnp.arange(LEVELS))[1]

    tokens, children = jax.lax.map(jax.vmap(sequence), jnp.arange(DRAWS).reshape(-1, block))
    return tokens.reshape(DRAWS, LEVELS), children.reshape(DRAWS, LEVELS)


def _check_law(tokens, p):
    first = p[0, 0].astype(np.float64)
    pair = first[:, None] * p[1]
    counts = np.zeros((V, V))
    np.add.at(counts, (tokens[:, 0], tokens[:, 1]), 1)
    assert _chi_square(counts.ravel(), pair.ravel()) < 5
    third = pair.sum(0) @ p[2]
    counts = np.zeros((V, V))
    np.add.at(counts, (tokens[:, 2], tokens[:, 3]), 1)
    assert _chi_square(counts.ravel(), (third[:, None] * p[3]).ravel()) < 5


KINDS = ("generic", "zeros", "equal", "disjoint", "one-hot")
CASES = [("generic", count) for count in range(1, MOST + 1)]
CASES += [(kind, count) for kind in KINDS[1:] for count in (1, 8)]


@pytest.mark.parametrize(("kind", "count"), CASES)
def test_B2_B7_law_of_sampled_children(kind, count):
    p, q = _tables(kind)
    tokens, children = map(np.asarray, _emit(p, q, count, "sampled"))
    _check_law(tokens, p)
    if count == 1:
        rate = float(rejection_acceptance(p[0, 0], q[0, 0]))
        assert abs((children[:, 0] == 0).mean() - rate) <= 4 * (rate * (1 - rate) / DRAWS) ** 0.5 + 1e-6


@pytest.mark.parametrize(("kind", "count"), [("generic", 1), ("generic", 8), *((k, 3) for k in KINDS)])
def test_B4_B6_law_of_fixed_children(kind, count):
    p, q = _tables(kind)
    tokens, children = map(np.asarray, _emit(p, q, count, "fixed"))
    _check_law(tokens, p)
    rate = p[0, 0, np.argsort(-q[0, 0], kind="stable")[:count]].sum()
    assert abs((children[:, 0] >= 0).mean() - rate) <= 4 * (rate * (1 - rate) / DRAWS) ** 0.5 + 1e-6


@pytest.mark.parametrize(("kind", "count"), [("generic", 8), *((k, 3) for k in KINDS)])
def test_law_of_fixed_and_sampled_children_together(kind, count):
    p, q = _tables(kind)
    _check_law(np.asarray(_emit(p, q, count, "mixed")[0]), p)


@pytest.mark.parametrize("kind", KINDS)
def test_law_of_coupled_drafts(kind):
    p, q = map(jnp.asarray, _tables(kind))

    @jax.jit
    def run(requests):
        def sequence(request):
            def level(before, at):
                token = jnp.argmax(jnp.log(p[at, before]) + token_noise(SEED, request, at, V))
                draft = coupled_children(SEED, request, at, jnp.log(q[at, before]), 3)
                return token, (token, draft)

            return jax.lax.scan(level, 0, jnp.arange(LEVELS))[1]

        return jax.vmap(sequence)(requests)

    tokens, drafts = map(np.asarray, run(jnp.arange(DRAWS)))
    _check_law(tokens, np.asarray(p))
    rate = float(coupled_acceptance(p[0, 0], q[0, 0]))
    hits = tokens[:, 0] == drafts[:, 0, 0]
    assert abs(hits.mean() - rate) <= 4 * (rate * (1 - rate) / DRAWS) ** 0.5 + 1e-6
    if kind == "equal":
        assert hits.all()


@pytest.mark.parametrize("lenience", [0.7, 0.3])
@pytest.mark.parametrize("kind", ["generic", "zeros", "disjoint"])
def test_lenience_deviates_as_its_formula_says(kind, lenience):
    p, q = _tables(kind)
    tokens, children = map(np.asarray, _emit(p, q, 1, "sampled", lenience))
    want = np.asarray(lenient_distribution(p[0, 0], q[0, 0], lenience), np.float64)
    counts = np.bincount(tokens[:, 0], minlength=V)
    assert _chi_square(counts, want) < 5
    rate = np.minimum(q[0, 0], p[0, 0] / lenience).sum()
    assert abs((children[:, 0] == 0).mean() - rate) <= 4 * (rate * (1 - rate) / DRAWS) ** 0.5 + 1e-6
    assert (want <= p[0, 0] / lenience + 1e-6).all()
    if kind == "generic":
        assert _chi_square(counts, p[0, 0]) > 50


def test_lenience_of_1_is_the_target():
    p, q = _tables("generic")
    np.testing.assert_allclose(lenient_distribution(p[0, 0], q[0, 0], 1.0), p[0, 0], atol=1e-6)


@functools.partial(jax.jit, static_argnames="count")
def _repeat(p, tokens, q, sampled, count=200_000):
    keys = stream_key(SEED, jnp.arange(count), 0, Stream.ACCEPT)
    return jax.vmap(lambda key: verify_children(key, p, tokens, q, sampled))(keys)


def _many(p, tokens, q=None, sampled=False):
    p, tokens = np.array(p, np.float32), np.array(tokens)
    q = np.zeros_like(p) if q is None else np.array(q, np.float32)
    return map(np.asarray, _repeat(p, tokens, q, np.broadcast_to(np.array(sampled), tokens.shape)))


def test_B1_residual_is_normalised_not_softmaxed():
    np.testing.assert_allclose(residual(jnp.array([0.6, 0.4]), jnp.array([0.9, 0.1])), [0, 1])


def test_B3_q_is_what_was_sampled_from():
    p = np.array([0.5, 0.3, 0.2])
    filtered = np.array([0.0, 1.0, 0.0])  # the draft's top-k 1 of soft raw probabilities
    token, child = _many(p, [1], filtered, True)
    assert _chi_square(np.bincount(token, minlength=3), p) < 5
    assert abs((child == 0).mean() - 0.3) < 4 * (0.21 / DRAWS) ** 0.5


def test_B5_fixed_children_are_not_tested_against_soft_q():
    p = [0.5, 0.3, 0.1, 0.06, 0.04]
    token, child = _many(p, [0, 1])
    assert _chi_square(np.bincount(token, minlength=5), np.array(p)) < 5
    assert abs((child >= 0).mean() - 0.8) < 4 * (0.16 / DRAWS) ** 0.5


def test_B8_one_draw_per_node():
    token, child = _many([0.5, 0.5], [0, 1])
    assert abs((token == 0).mean() - 0.5) < 4 * (0.25 / DRAWS) ** 0.5
    np.testing.assert_array_equal(token, child)


def test_B12_inputs_are_left_alone():
    p = np.array([0.25, 0.75], np.float32)
    q = np.array([0.5, 0.5], np.float32)
    device = jnp.asarray(p), jnp.asarray(q)
    verify_children(jnp.array([1, 2], jnp.uint32), *device[:1], jnp.array([0]), device[1], jnp.array([True]))
    np.testing.assert_array_equal(device[0], p)
    np.testing.assert_array_equal(device[1], q)


def test_B13_acceptance_equals_the_probability():
    _, child = _many([0.1, 0.9], [0])
    assert abs((child == 0).mean() - 0.1) < 3 * (0.09 / DRAWS) ** 0.5


def test_B16_padding_is_never_accepted():
    token, child = _many([0.2, 0.2, 0.2, 0.2, 0.2], [4, -1, -1])
    assert set(np.unique(child)) == {-1, 0}
    assert set(np.unique(token)) == {0, 1, 2, 3, 4}
    assert (token[child == 0] == 4).all()
    token, child = _many([0.2, 0.8], [-1, -1])
    assert (child == -1).all()
    assert abs(token.mean() - 0.8) < 4 * (0.16 / DRAWS) ** 0.5


def test_B18_strict_comparison():
    assert not is_accepted(0.0, 0.0, 0.5)
    assert not is_accepted(0.0, 0.0, 0.0)
    assert is_accepted(0.0, 1e-30, 1.0)
    assert not is_accepted(0.5, 0.25, 0.5)
    assert is_accepted(0.4999, 0.25, 0.5)
    token, child = _many([0.0, 1.0], [0], [1.0, 0.0], True)
    assert (child == -1).all()
    assert (token == 1).all()


def test_B19_residual_without_mass_is_defined():
    p = jnp.array([0.0, 0.4, 0.6])
    np.testing.assert_array_equal(residual(p, p), p)
    # The children hold all of the mass, which falls short of 1: a rejection still has a right answer.
    for sampled in (True, False):
        token, child = _many([0.0, 0.5, 0.0], [1], [0.0, 1.0, 0.0], sampled)
        assert (token == 1).all()
        assert (child == -1).any()


def test_greedy_target_accepts_its_own_token_alone():
    p = np.eye(4)[2]
    token, child = _many(p, [0, 2, 3])
    assert (token == 2).all()
    assert (child == 1).all()
    token, child = _many(p, [0, 1], [0.5, 0.3, 0.1, 0.1], True)
    assert (token == 2).all()
    assert (child == -1).all()


def test_B33_rows_of_a_chain_stay_in_order():
    best = np.array([3, 1, 4, 0, 2])
    p = jnp.asarray(np.eye(5)[best], jnp.float32)
    q = jnp.full((4, 5), 0.2)
    keys = stream_key(SEED, jnp.int32(0), jnp.arange(5), Stream.ACCEPT)
    verify = jax.jit(verify_chain)
    for wrong in range(5):
        draft = best[:4].copy()
        draft[wrong:] = (draft[wrong:] + 1) % 5
        tokens, count = verify(keys, p, jnp.asarray(draft), q)
        assert count == wrong + 1
        assert tokens.tolist() == [*best[: wrong + 1].tolist(), *[-1] * (4 - wrong)]
    tokens, count = verify(keys, p, jnp.array([3, 1, -1, -1]), q)
    assert (count, tokens.tolist()) == (3, [3, 1, 4, -1, -1])


def test_law_of_a_chain():
    p, q = _tables("generic")
    p, q = p[:3, 0], q[:2, 0]

    @jax.jit
    def run(requests):
        def one(request):
            draw = stream_key(SEED, request, jnp.arange(2), Stream.DRAFT)
            drafts = jax.vmap(lambda key, q: draw_children(key, q, 1)[0])(draw, q)
            return verify_chain(stream_key(SEED, request, jnp.arange(3), Stream.ACCEPT), p, drafts, q)

        return jax.vmap(one)(requests)

    tokens, count = map(np.asarray, run(jnp.arange(DRAWS)))
    for level in range(3):
        reached = tokens[count > level, level]
        assert _chi_square(np.bincount(reached, minlength=V), p[level]) < 5
    assert (tokens >= 0).sum(1).tolist() == count.tolist()
    rate = float(rejection_acceptance(p[0], q[0]))
    assert abs((count > 1).mean() - rate) < 4 * (rate * (1 - rate) / DRAWS) ** 0.5


_weights = st.lists(st.sampled_from([0.0, 0.0, 1e-6, 0.3, 1.0, 5.0]), min_size=5, max_size=5).filter(any)


@settings(max_examples=200, deadline=None)
@given(
    p=_weights,
    q=_weights,
    request=st.integers(0, 2**31 - 1),
    count=st.integers(0, 5),
    mask=st.integers(0, 31),
)
def test_emitted_token_always_has_positive_probability(p, q, request, count, mask):
    p, q = (np.array(w, np.float32) / np.float32(sum(w)) for w in (p, q))
    tokens = np.asarray(_draw_five(request, q))
    tokens = np.where(np.arange(5) < count, tokens, -1)
    token, child = _verify_five(request, p, tokens, q, (mask >> np.arange(5)) % 2 == 0)
    assert p[token] > 0
    assert child == -1 or tokens[child] == token
    assert (child >= 0) <= (token in tokens)


@jax.jit
def _draw_five(request, q):
    return draw_children(stream_key(SEED, request, 0, Stream.DRAFT), q, 5)


@jax.jit
def _verify_five(request, p, tokens, q, sampled):
    return verify_children(stream_key(SEED, request, 0, Stream.ACCEPT), p, tokens, q, sampled)


def test_children_are_drawn_without_replacement():
    q = jnp.array([0.5, 0.0, 0.3, 0.2])
    keys = stream_key(SEED, jnp.arange(DRAWS), 0, Stream.DRAFT)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: draw_children(key, q, 6)))(keys))
    assert (np.sort(drawn, 1) == [-1, -1, -1, 0, 2, 3]).all()
    want = {
        (0, 2): 0.5 * 0.6,
        (0, 3): 0.5 * 0.4,
        (2, 0): 0.3 * 5 / 7,
        (2, 3): 0.3 * 2 / 7,
        (3, 0): 0.2 * 5 / 8,
    }
    want[3, 2] = 0.2 * 3 / 8
    counts = np.array([((drawn[:, 0] == a) & (drawn[:, 1] == b)).sum() for a, b in want])
    assert _chi_square(counts, np.array(list(want.values()))) < 5
    excluded = np.asarray(draw_children(keys[0], q, 3, exclude=jnp.array([0, -1])))
    assert sorted(excluded.tolist()) == [-1, 2, 3]
