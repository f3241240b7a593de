import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxlookahead.sampling import (
    Constraint,
    Matcher,
    MatcherConstraint,
    Sampling,
    advance,
    decide,
    init_context,
)

from .helpers import EOS, L, V, padded, processed, rows

OPEN, CLOSE, WORD = 3, 4, 5


class Brackets:
    """Balanced brackets around words, once the token OPEN was seen; before that anything goes."""

    def __init__(self):
        self.steps = []

    def start(self, request):
        return 0

    def step(self, state, token):
        self.steps.append((state, token))
        return state + (token == OPEN) - (token == CLOSE and state > 0)

    def mask(self, state):
        if state == 0:
            return None
        mask = np.zeros(V, bool)
        mask[[OPEN, CLOSE, WORD]] = True
        return mask


@functools.partial(jax.jit, static_argnames="constraint")
def walk(arrays, history, prompt_length, logits, tree_tokens, tree_parents, constraint):
    """The accept walk in small: node i of a `[B, N]` tree has logits; returns the emitted tokens, then -1."""
    batch = logits.shape[0]

    def body(carry):
        context, node, emitted, depth, active = carry
        here = jnp.take_along_axis(logits, node[:, None, None], axis=1)[:, 0]
        token = decide(arrays, context, here, constraint=constraint).token
        context = advance(context, token, active)
        emitted = emitted.at[:, depth].set(jnp.where(active, token, -1))
        child = (tree_parents == node[:, None]) & (tree_tokens == token[:, None])
        return context, jnp.argmax(child, axis=1).astype(jnp.int32), emitted, depth + 1, active & child.any(1)

    start = (
        init_context(arrays, history, prompt_length, prompt_length),
        jnp.zeros(batch, jnp.int32),
        jnp.full((batch, tree_tokens.shape[1] + 1), -1, jnp.int32),
        jnp.int32(0),
        jnp.ones(batch, bool),
    )
    return lax.while_loop(lambda carry: carry[-1].any(), body, start)[2]


def _run(constraint, tokens, parents, best, sampling=Sampling()):  # noqa: B008
    """One row; `best[i]` is the token that node i's logits favour, then WORD, then CLOSE."""
    logits = np.zeros((1, len(tokens), V), np.float32)
    for node, token in enumerate(best):
        logits[0, node, WORD], logits[0, node, CLOSE], logits[0, node, token] = 5, 4, 9
    emitted = walk(
        rows([sampling], requests=[8]),
        padded([[1]]),
        np.array([1]),
        logits,
        np.array([tokens]),
        np.array([parents]),
        constraint,
    )[0]
    return [int(token) for token in emitted if token >= 0]


def test_E1_illegal_draft_is_not_emitted():
    constraint = MatcherConstraint(Brackets())
    # Inside the bracket the model wants EOS, which the draft offers and the grammar refuses.
    assert _run(constraint, [9, OPEN, EOS], [-1, 0, 1], [OPEN, EOS, 7]) == [OPEN, WORD]
    assert _run(constraint, [9, 7, EOS], [-1, 0, 1], [7, EOS, 7])[:2] == [7, EOS]


def test_E2_constraint_that_starts_in_the_middle_of_a_draft_holds_from_there():
    constraint = MatcherConstraint(Brackets())
    tokens, parents = [9, 7, OPEN, WORD, 7], [-1, 0, 1, 2, 3]
    assert _run(constraint, tokens, parents, [7, OPEN, 7, 7, 7]) == [7, OPEN, WORD, WORD]
    # And it ends where the bracket closes.
    tokens, parents = [9, OPEN, CLOSE, 7], [-1, 0, 1, 2]
    assert _run(constraint, tokens, parents, [OPEN, CLOSE, 7, 11]) == [OPEN, CLOSE, 7, 11]


def test_E3_rejected_drafts_never_reach_the_matcher():
    matcher = Brackets()
    constraint = MatcherConstraint(matcher)
    tokens, parents = [9, OPEN, 7, 7, CLOSE], [-1, 0, 0, 1, 1]
    assert _run(constraint, tokens, parents, [OPEN, WORD, 7, 7, 7]) == [OPEN, WORD]
    # One step for the one emitted token that was followed by a decision; none for the drafts 7 and CLOSE.
    assert matcher.steps == [(0, OPEN)]
    before = constraint.allowed(8, (OPEN,)).copy()
    constraint.allowed(8, (OPEN, CLOSE, 7))
    np.testing.assert_array_equal(constraint.allowed(8, (OPEN,)), before)
    assert matcher.steps == [(0, OPEN), (1, CLOSE), (0, 7)]


def test_forgotten_states_are_computed_again():
    small, large = MatcherConstraint(Brackets(), max_states=1), MatcherConstraint(Brackets())
    for emitted in [
        (OPEN, WORD, OPEN),
        (OPEN,),
        (OPEN, WORD),
        (),
        (OPEN, WORD, CLOSE, 7),
        (OPEN, OPEN, CLOSE),
    ]:
        a, b = small.allowed(1, emitted), large.allowed(1, emitted)
        assert (a is None) == (b is None)
        assert a is None or (a == b).all()
    with pytest.raises(ValueError, match="max_states = 0"):
        MatcherConstraint(Brackets(), max_states=0)


def test_protocols():
    assert isinstance(Brackets(), Matcher)
    assert isinstance(MatcherConstraint(Brackets()), Constraint)


class OnlyFor:
    """Allows one token for one request."""

    def __init__(self, request, answer):
        self.request, self.answer, self.asked = request, answer, []

    def allowed(self, request, emitted):
        self.asked.append((request, emitted))
        return self.answer if request == self.request else None


def test_only_rows_with_a_request_are_asked():
    constraint = OnlyFor(6, np.arange(V) == 11)
    arrays = rows([Sampling()] * 3, requests=[5, 6, -1])
    lengths = np.array([1, 2, 0]), np.array([2, 4, 0])

    @jax.jit
    def run(logits):
        return decide(
            arrays,
            init_context(arrays, padded([[1, 8], [1, 1, 8, 9], []]), *lengths),
            logits,
            constraint=constraint,
        )

    assert run(jnp.asarray(np.eye(V)[[7, 7, 7]])).token.tolist() == [7, 11, 7]
    assert sorted(constraint.asked) == [(5, (8,)), (6, (8, 9))]


def test_forced_token_wins_over_the_constraint():
    constraint = OnlyFor(0, np.arange(V) == 11)
    got = processed(Sampling(forced_tokens={0: 4}), [1], [], np.zeros(V), constraint=constraint)
    assert got[4] == 0


@pytest.mark.parametrize("answer", [np.ones(V - 1, bool), np.ones(V)])
def test_wrong_mask_is_refused(answer):
    with pytest.raises(Exception, match=rf"must return bool\[{V}\] or None"):
        processed(Sampling(), [1], [], np.zeros(V), constraint=OnlyFor(0, answer))


def test_width_of_history():
    # A full history: the last token has no slot to be written to, the masks still come.
    constraint = OnlyFor(0, np.arange(V) == 11)
    assert processed(Sampling(), [1], list(range(L - 1)), np.zeros(V), constraint=constraint)[11] == 0
