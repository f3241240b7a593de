from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlookahead import accept, tree
from jaxlookahead.accept import Progress, StopRules

PATHS = [[5, 6, 7], [5, 8], [9]]  # nodes: 0 root, 1: 5, 2: 6, 3: 7, 4: 8, 5: 9


def run(next_tokens, *, paths=PATHS, remaining=9, eos=(), stop=(), tail=(), vocab=12, logits=None):
    """Walks one tree whose model prefers `next_tokens[i]` at node `i`."""
    drafted = tree.from_drafts([1], [tree.draft_from_paths(paths)])
    if logits is None:
        logits = 3.0 * jax.nn.one_hot(jnp.array([next_tokens]), vocab)
    longest = max([1, *map(len, stop)])
    sequences = np.full((1, max(len(stop), 1), longest), -1, np.int32)
    for i, sequence in enumerate(stop):
        sequences[0, i, -len(sequence) :] = sequence
    tails = np.full((1, longest), -1, np.int32)
    if tail:
        tails[0, -len(tail) :] = tail[-longest:]
    walk = accept.walk(
        drafted,
        Progress(remaining=jnp.array([remaining]), tail=jnp.asarray(tails)),
        StopRules(eos=jnp.array([list(eos) or [-1]]), sequences=jnp.asarray(sequences)),
        accept.greedy(logits),
    )
    count = int(walk.counts[0])
    return walk.tokens[0, :count].tolist(), walk.path[0, :count].tolist(), int(walk.finish[0]), walk


def test_golden_walk():
    tokens, path, finish, walk = run([5, 8, 0, 0, 3, 0])
    assert (tokens, path, finish) == ([5, 8, 3], [0, 1, 4], accept.RUNNING)
    assert walk.nodes[0].tolist() == [1, 4, 0, 0, 0, 0]
    assert walk.tokens[0].tolist() == [5, 8, 3, -1, -1, -1]
    assert walk.margins[0].tolist() == [3, 3, 3, 0, 0, 0]
    assert int(walk.progress.remaining[0]) == 6


def test_rejected_at_the_root():
    assert run([2, 6, 7, 0, 0, 0])[:3] == ([2], [0], accept.RUNNING)


def test_whole_path_and_bonus():
    assert run([5, 6, 7, 11, 0, 0])[:3] == ([5, 6, 7, 11], [0, 1, 2, 3], accept.RUNNING)


@pytest.mark.parametrize("offset", range(4))
def test_C1_C5_A7_eos_at_every_offset(offset):
    """Accepted or decided, an EOS ends the walk there and nothing follows it."""
    path = [5, 6, 7, 11]
    tokens, _, finish, walk = run([*path, 0, 0], eos=[path[offset], 10])
    assert tokens == path[: offset + 1]
    assert finish == accept.EOS
    assert int(walk.progress.remaining[0]) == 0


def test_C6_drafted_eos_that_is_rejected():
    assert run([5, 8, 7, 11, 3, 0], eos=[6])[:3] == ([5, 8, 3], [0, 1, 4], accept.RUNNING)


def test_C7_eos_decided_where_it_was_not_drafted():
    assert run([5, 2, 7, 11, 3, 0], eos=[2])[:3] == ([5, 2], [0, 1], accept.EOS)


def test_C8_committed_counts_what_is_emitted():
    tokens, _, _, walk = run([5, 6, 7, 8, 9, 3], paths=[[5, 6, 7, 8, 9]], eos=[7])
    assert tokens == [5, 6, 7] and int(walk.counts[0]) == 3
    assert (walk.nodes[0] > 0).sum() == 3


@pytest.mark.parametrize("remaining", range(5))
def test_A4_length_cap(remaining):
    tokens, _, finish, walk = run([5, 6, 7, 11, 0, 0], remaining=remaining)
    assert tokens == [5, 6, 7, 11][:remaining]
    assert finish == (accept.RUNNING if remaining == 0 else accept.LENGTH if remaining <= 4 else accept.RUNNING)
    assert int(walk.progress.remaining[0]) == max(remaining - 4, 0)


@pytest.mark.parametrize(
    ("stop", "tail", "tokens"),
    [
        ([[6, 7]], (), [5, 6, 7]),
        ([[7], [6]], (), [5, 6]),
        ([[4, 5]], (4,), [5]),  # begun in the step before
        ([[4, 5]], (), [5, 6, 7, 11]),
        ([[4, 5]], (4, 3), [5, 6, 7, 11]),
        ([[2, 4, 5, 6], [7]], (2, 4), [5, 6]),
        ([[6, 7, 11]], (), [5, 6, 7, 11]),
    ],
)
def test_C3_stop_sequences(stop, tail, tokens):
    got, _, finish, _ = run([5, 6, 7, 11, 0, 0], stop=stop, tail=tail)
    assert got == tokens
    assert (finish == accept.STOP) == (tokens != [5, 6, 7, 11] or stop == [[6, 7, 11]])


def test_eos_wins_over_stop_and_length():
    assert run([5, 6, 7, 11, 0, 0], eos=[5], stop=[[5]], remaining=1)[2] == accept.EOS
    assert run([5, 6, 7, 11, 0, 0], stop=[[5]], remaining=1)[2] == accept.STOP


def test_token_zero_is_a_token():
    """F1, A27."""
    assert run([0, 0, 0, 0], paths=[[0, 0, 0]])[:2] == ([0, 0, 0, 0], [0, 1, 2, 3])


def test_B17_nan_logits():
    logits = np.full((1, 6, 12), 0.0, np.float32)
    logits[0, 0, 5] = 3
    logits[0, 1] = np.nan
    tokens, _, finish, walk = run(None, logits=jnp.asarray(logits))
    assert (tokens, finish) == ([5], accept.BAD_LOGITS)
    assert int(walk.tokens.max()) < 12
    logits[0, 1] = -np.inf
    assert run(None, logits=jnp.asarray(logits))[2] == accept.BAD_LOGITS
    logits[0, 2] = np.nan  # a node off the path is of no account
    logits[0, 1] = np.eye(12)[8]
    assert run(None, logits=jnp.asarray(logits))[2] == accept.RUNNING


def test_best_two():
    x = np.random.default_rng(0).normal(size=(3, 4, 70)).astype(np.float32)
    x[0, 0, [3, 9]] = 50  # a tie
    index, margin, bad = accept.best_two(jnp.asarray(x))
    assert (np.asarray(index) == x.argmax(-1)).all() and not np.asarray(bad).any()
    top = np.sort(x, -1)
    np.testing.assert_array_equal(np.asarray(margin), top[..., -1] - top[..., -2])
    assert margin[0, 0] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_B17_no_argmax(value):
    x = np.zeros((3, 7), np.float32)
    x[0, 4], x[1] = value, -np.inf
    index, margin, bad = accept.best_two(jnp.asarray(x))
    assert bad.tolist() == [True, True, False] and margin.tolist() == [0, 0, 0]
    assert ((index >= 0) & (index < 7)).all()


def test_rows_are_independent():
    """A1, B33: each row follows its own tree, an ended row emits nothing."""
    rng = np.random.default_rng(1)
    drafts = [tree.draft_from_paths(rng.integers(0, 4, (5, 4)).tolist()) for _ in range(6)]
    batch = tree.from_drafts([0] * 6, drafts)
    logits = jnp.asarray(rng.normal(size=(*batch.tokens.shape, 4)), jnp.float32)
    remaining = jnp.array([3, 0, 9, 1, 9, 9])

    def walk(rows):
        size = len(rows)
        return accept.walk(
            tree.DraftTree(tokens=batch.tokens[rows], parents=batch.parents[rows]),
            Progress(remaining=remaining[rows], tail=jnp.full((size, 1), -1)),
            StopRules(eos=jnp.full((size, 1), -1), sequences=jnp.full((size, 1, 1), -1)),
            accept.greedy(logits[rows]),
        )

    together = walk(np.arange(6))
    assert int(together.counts[1]) == 0 and together.tokens[1].tolist() == [-1] * batch.width
    for row in range(6):
        alone = walk(np.array([row]))
        assert jax.tree.all(jax.tree.map(lambda a, b, row=row: bool((a[row] == b[0]).all()), together, alone))
