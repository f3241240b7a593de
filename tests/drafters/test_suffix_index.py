"""The suffix index against brute force: counts, ranks, matches, removal, eviction."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlookahead.drafters import suffix_index
from jaxlookahead.drafters.removal import remove_document, remove_root
from jaxlookahead.drafters.request_state import search
from jaxlookahead.drafters.suffix_index import (
    COUNT,
    DEPTH,
    END,
    FIRST,
    LAST,
    LINK,
    PARENT,
    RANKED,
    REFS,
    SHIFT,
    TOKEN,
    TOP,
    SuffixIndex,
)

documents = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=25), min_size=1, max_size=5)
depths = st.integers(2, 6)


def true_counts(texts, depth):
    counts = Counter()
    for text in texts:
        closed = [*text, END]
        for i in range(len(closed)):
            for n in range(1, min(depth, len(closed) - i) + 1):
                counts[tuple(closed[i : i + n])] += 1
    return counts


def string(index, root, node):
    tokens = []
    while node != root:
        tokens.append(index.nodes[(node << SHIFT) + TOKEN])
        node = index.nodes[(node << SHIFT) + PARENT]
    return tuple(reversed(tokens))


def whole_state(index, root):
    """Everything drafts depend on: counts, ranks, and what each string seen once goes on with."""
    state = {}
    stack = [root]
    while stack:
        for node in index.children(stack.pop()):
            at = node << SHIFT
            ranked = tuple(index.nodes[(c << SHIFT) + TOKEN] for c in index.nodes[at + TOP : at + TOP + RANKED] if c)
            last = index.nodes[at + LAST]
            follower = None
            if not index.nodes[at + FIRST] and index.nodes[at + TOKEN] != END and last >= 0:
                follower = index.token_at(last + 1)
                follower = None if follower == END else follower
            state[string(index, root, node)] = (index.nodes[at + COUNT], ranked, follower)
            stack.append(node)
    return state


def build(texts, depth, **options):
    index = SuffixIndex(depth, **options)
    root = index.new_root()
    spans = []
    for text in texts:
        start = index.position
        index.add(root, text)
        spans.append((start, index.position))
    return index, root, spans


@given(documents, depths)
def test_counts_are_the_brute_force_counts(texts, depth):
    index, root, _ = build(texts, depth)
    counts = true_counts(texts, depth)
    # A string is a node if the one without its last token has occurred more than once.
    expected = {s: n for s, n in counts.items() if len(s) == 1 or counts[s[:-1]] > 1}
    assert index.contexts(root) == expected


@given(documents, depths)
def test_links_and_ranks(texts, depth):
    index, root, _ = build(texts, depth, shards=7)
    refs = Counter()
    for node in range(1, index.used + 1):
        at = node << SHIFT
        if node == root:
            continue
        link = index.nodes[at + LINK]
        refs[link] += 1
        assert string(index, root, link) == string(index, root, node)[1:]
        kids = [c for c in index.children(node) if index.nodes[(c << SHIFT) + TOKEN] != END]
        order = sorted(kids, key=lambda c: (-index.nodes[(c << SHIFT) + COUNT], -index.nodes[(c << SHIFT) + LAST]))
        ranked = [c for c in index.nodes[at + TOP : at + TOP + RANKED] if c]
        assert ranked == order[:RANKED]
    assert all(index.nodes[(node << SHIFT) + REFS] == refs[node] for node in range(1, index.used + 1))


@given(documents, depths, st.lists(st.integers(0, 4), max_size=12))
def test_match_is_the_longest_known_suffix(texts, depth, query):
    index, root, _ = build(texts, depth)
    known = index.contexts(root)
    longest = max((n for n in range(1, depth + 1) if tuple(query[-n:]) in known and n <= len(query)), default=0)
    node, length, pointer = search(index, root, query)
    assert string(index, root, node) == tuple(query[len(query) - longest :])
    if pointer >= 0:
        # What the pointer says was matched stands before it, and something stands after it.
        assert [index.token_at(pointer - back) for back in range(length)] == query[::-1][:length]
        assert 0 <= index.token_at(pointer + 1) < END


@settings(max_examples=200)
@given(documents, depths, st.data())
def test_removal_is_exact(texts, depth, data):
    index, root, spans = build(texts, depth)
    gone = data.draw(st.integers(0, len(texts) - 1))
    ends = [stop - 1 for i, (_, stop) in enumerate(spans) if i != gone]
    remove_document(index, root, *spans[gone], ends)
    other, other_root, _ = build([text for i, text in enumerate(texts) if i != gone], depth)
    assert whole_state(index, root) == whole_state(other, other_root)
    for i, span in enumerate(spans):
        if i != gone:
            ends.remove(span[1] - 1)
            remove_document(index, root, *span, ends)
    assert index.used == 1 and not index.children(root)
    index.drop_root(root)
    assert index.used == 0


@given(documents, documents, depths)
def test_roots_are_separate(one, two, depth):
    index = SuffixIndex(depth)
    roots = [index.new_root(), index.new_root()]
    for root, texts in zip(roots, (one, two), strict=True):
        for text in texts:
            index.add(root, text)
    assert index.contexts(roots[0]) == build(one, depth)[0].contexts(1)
    remove_root(index, roots[0])
    assert index.contexts(roots[1]) == build(two, depth)[0].contexts(1)


def consistent(index, roots):
    alive = set(roots)
    stack = list(roots)
    while stack:
        node = stack.pop()
        for child in index.children(node):
            at = child << SHIFT
            assert child not in alive
            assert index.nodes[at + PARENT] == node
            assert index.nodes[at + DEPTH] == index.nodes[(node << SHIFT) + DEPTH] + 1
            assert index.find(node, index.nodes[at + TOKEN]) == child
            alive.add(child)
            stack.append(child)
    refs = Counter()
    for node in alive:
        at = node << SHIFT
        if node not in roots:
            assert index.nodes[at + LINK] in alive
            refs[index.nodes[at + LINK]] += 1
        kids = set(index.children(node))
        assert {c for c in index.nodes[at + TOP : at + TOP + RANKED] if c} <= kids
        assert node in roots or sum(index.nodes[(c << SHIFT) + COUNT] for c in kids) <= index.nodes[at + COUNT]
    assert all(index.nodes[(node << SHIFT) + REFS] == refs[node] for node in alive)
    assert len(alive) == index.used == sum(map(len, index.edges)) + len(roots)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 5), st.integers(1, 3), st.integers(2, 200))
def test_eviction_keeps_the_cap_and_everything_consistent(seed, depth, many, vocabulary):
    rng = random.Random(seed)
    cap = 8 * (depth + 1) + rng.randrange(200)
    index = SuffixIndex(depth, max_nodes=cap, shards=3)
    roots = [index.new_root() for _ in range(many)]
    held = []
    for _ in range(30):
        root = rng.choice(roots)
        live = []
        start = index.position
        for _ in range(rng.randrange(1, 40)):
            live = index.push(root, live, rng.randrange(vocabulary))
            assert index.used <= cap
        index.close(root, live)
        assert index.used <= cap and len(index.text) <= cap
        held.append((root, start, index.position))
        held = [span for span in held if span[1] >= index.position - index.text_capacity]
        if held and rng.random() < 0.3:
            root, start, stop = held.pop(rng.randrange(len(held)))
            remove_document(index, root, start, stop, [end - 1 for r, _, end in held if r == root])
            consistent(index, roots)
    consistent(index, roots)


def test_eviction_prefers_old_and_rare():
    index = SuffixIndex(4, max_nodes=2000)
    root = index.new_root()
    for _ in range(40):
        index.add(root, [1, 2, 3, 4])
    index.add(root, [5, 6, 7, 8])
    for i in range(600):
        index.add(root, range(100 + 5 * i, 105 + 5 * i))
    # Twice the capacity came after both; what occurred often is still known, what occurred once is not.
    assert index.find(index.find(root, 1), 2)
    assert not index.find(root, 5)
    newest = index.find(root, 100 + 5 * 599)
    assert newest and index.token_at(index.nodes[(newest << SHIFT) + LAST] + 1) == 101 + 5 * 599


def test_A18_capacity_must_exceed_depth():
    with pytest.raises(ValueError, match="max_nodes=6"):
        SuffixIndex(6, max_nodes=6)
    with pytest.raises(ValueError, match="depth=1"):
        SuffixIndex(1)


def test_positions_are_renumbered_before_they_overflow(monkeypatch):
    monkeypatch.setattr(suffix_index, "MAX_POSITION", 500)
    index = SuffixIndex(3, max_nodes=200)
    root = index.new_root()
    for i in range(100):
        index.add(root, [7, 8, 9, i + 10, 11])
        assert index.position <= 500
    assert index.shifted > 0
    consistent(index, [root])
    node = search(index, root, [7, 8])[0]
    assert index.nodes[(index.nodes[(node << SHIFT) + TOP] << SHIFT) + TOKEN] == 9
