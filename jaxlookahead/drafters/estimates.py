"""Next-token estimates from the request's own text and shared text.

A *place* says where a path stands in both texts: `(node, length, pointer, shared_node, shared_length,
shared_pointer)`. `node` is the longest context that the path ends in, `length` the length of the longest
match, and `pointer` the position of that match's last token, or -1 where nothing can be copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxlookahead.drafters.calibration import (
    CONTEXTS,
    COPIES,
    DEPTH_BASE,
    LAST_MISS,
    LAST_TOTAL,
    LENGTH_BASE,
    MAX_MATCH,
    MISS_BUCKET,
    RARITY_STEP,
    TOTAL_BASE,
    UNIQUENESS_STEP,
    Calibration,
    rarity_bucket,
    uniqueness_bucket,
)
from jaxlookahead.drafters.sources import Source
from jaxlookahead.drafters.suffix_index import (
    COUNT,
    DEPTH,
    END,
    FACTOR,
    FIRST,
    LAST,
    LINK,
    SHIFT,
    STRIDE,
    TOP,
    SuffixIndex,
)

Place = tuple[int, int, int, int, int, int]
Side = tuple[Any, ...]
Part = tuple[str, list[float], list[Any], int, float]
NAMES = ("request", "shared")

# What the longest contexts leave over is given up once it is less than this share.
# (An odd number, so that products of round weights do not meet it, where rounding would decide.)
CUT = 0.0973
# The probability, of what all predictions leave over, of any one token.
UNKNOWN = 0.002


class Texts(NamedTuple):
    """What a request is drafted from.

    Attributes:
      own: the index over the request's text.
      own_root: its root.
      shared: the index over shared text.
      shared_root: the root of the request's namespace there.
      calibration: the weights of that namespace.
      success: recent rates of right copies, own and shared, as buckets.
      extras: further sources.
    """

    own: SuffixIndex
    own_root: int
    shared: SuffixIndex
    shared_root: int
    calibration: Calibration
    success: tuple[int, int]
    extras: tuple[Source, ...] = ()


def match_length(text: SuffixIndex, position: int, own: SuffixIndex) -> int:
    """How many tokens up to `position` in `text` equal the newest tokens of `own`, at most `MAX_MATCH`."""
    newest = own.position - 1
    length = 0
    while length < MAX_MATCH and length <= newest:
        token = text.token_at(position - length)
        if token < 0 or token != own.text[newest - length]:
            break
        length += 1
    return length


def mover(texts: Texts) -> Callable[[Place, int], Place]:
    """A function from a place and a token to the place after it."""
    own, own_root, shared, shared_root = texts[:4]
    own_nodes, own_text, own_edges = own.nodes, own.text, own.edges[0]
    shared_nodes, shared_text, shared_edges = shared.nodes, shared.text, shared.edges
    shards, ring, tip, back = shared.shards, shared.text_capacity, own.position - 1, own.back
    if back >= tip:
        back = -1

    def move(place: Place, token: int) -> Place:
        node, length, pointer, shared_node, shared_length, shared_pointer = place
        while True:
            child = own_edges.get(node * FACTOR + token)
            if child is not None:
                node = child
                break
            if node == own_root:
                break
            node = own_nodes[(node << SHIFT) + LINK]
        if pointer >= 0 and own_text[pointer + 1] == token:
            pointer += 1
            length += 1
        else:
            at = node << SHIFT
            length = own_nodes[at + DEPTH]
            pointer = own_nodes[at + LAST] if length and not own_nodes[at + FIRST] else -1
        if pointer >= tip:
            # The copy has come to the end of the text: it goes on where the end itself occurred before.
            pointer = back
        while True:
            key = shared_node * FACTOR + token
            child = shared_edges[key % shards].get(key)
            if child is not None:
                shared_node = child
                break
            if shared_node == shared_root:
                break
            shared_node = shared_nodes[(shared_node << SHIFT) + LINK]
        if shared_pointer >= 0 and shared_text[(shared_pointer + 1) % ring] == token:
            shared_pointer += 1
            shared_length += 1
        else:
            at = shared_node << SHIFT
            shared_length = shared_nodes[at + DEPTH]
            shared_pointer = shared_nodes[at + LAST] if shared_length and not shared_nodes[at + FIRST] else -1
        if shared_pointer >= 0:
            following = shared.token_at(shared_pointer + 1)
            if following < 0 or following == END:
                shared_pointer = -1
        return node, length, pointer, shared_node, shared_length, shared_pointer

    return move


Stick = tuple[int, int, int, int, list[tuple[int, int]]]


def _source_sticks(texts: Texts, source: int, place: tuple[int, int, int]) -> Iterator[tuple[int, Stick]]:
    """The predictions of one text with the length of their context, longest first."""
    index = texts.own if source == 0 else texts.shared
    node, length, pointer = place
    nodes = index.nodes
    tip = index.position - 1 if source == 0 else -2
    seen = -1
    if pointer >= 0 and length > 0:
        at = node << SHIFT
        count = nodes[at + COUNT] - (nodes[at + LAST] == tip)
        leaf = not nodes[at + FIRST]
        rare = 0
        if length <= 3:
            unigram = texts.shared.find(texts.shared_root, index.token_at(pointer))
            seen_count = texts.shared.nodes[(unigram << SHIFT) + COUNT] if unigram else 0
            rare = rarity_bucket(seen_count, texts.shared.nodes[(texts.shared_root << SHIFT) + COUNT])
        bucket = source * COPIES + LENGTH_BASE[length] + RARITY_STEP * rare + texts.success[source]
        bucket += UNIQUENESS_STEP * uniqueness_bucket(count, leaf)
        yield length, (source, 0, bucket, 1, [(index.token_at(pointer + 1), 1)])
        if leaf:
            seen = count
            node = nodes[at + LINK]
    while nodes[(node << SHIFT) + DEPTH]:
        at = node << SHIFT
        count = nodes[at + COUNT] - (nodes[at + LAST] == tip)
        if count > 0 and count != seen and nodes[at + TOP]:
            ranked = [(nodes[c << SHIFT], nodes[(c << SHIFT) + COUNT]) for c in nodes[at + TOP : at + STRIDE] if c]
            length = nodes[at + DEPTH]
            yield length, (source, 1, _context_bucket(source, length, count, ranked[0][1]), count, ranked)
            seen = count
        node = nodes[at + LINK]


def sticks(texts: Texts, place: Place) -> Iterator[Stick]:
    """All predictions at a place, longest context first, the request's own before shared ones of the same length.

    Yields:
      `(source, kind, index, total, [(token, count), ...])`: `kind` 0 is a copy and 1 a context, `index` the place
      of its weight in the calibration, and `count / total` the share of each token.
    """
    own = _source_sticks(texts, 0, place[:3])
    shared = _source_sticks(texts, 1, place[3:])
    mine, theirs = next(own, None), next(shared, None)
    while True:
        if mine is not None and (theirs is None or mine[0] >= theirs[0]):
            yield mine[1]
            mine = next(own, None)
        elif theirs is not None:
            yield theirs[1]
            theirs = next(shared, None)
        else:
            return


def _context_bucket(source: int, depth: int, count: int, top: int) -> int:
    bucket = source * CONTEXTS + DEPTH_BASE[depth] + TOTAL_BASE[min(count, LAST_TOTAL)]
    return bucket + MISS_BUCKET[max(min(count - top, LAST_MISS), 0)]


def estimate(texts: Texts, place: Place) -> dict[int, float]:
    """Estimated probabilities of the next token: the plain form of what `grow` does.

    Without further sources.
    """
    calibration = texts.calibration
    rest = 1.0
    found: dict[int, float] = {}
    for _, kind, bucket, total, ranked in sticks(texts, place):
        weight = (calibration.context if kind else calibration.copy)[bucket]
        for token, count in ranked:
            found[token] = found.get(token, 0.0) + rest * weight * count / total
        rest *= 1.0 - weight
        if rest < CUT:
            break
    return found


def _parts(texts: Texts, place: Place, side: Side, token: int) -> tuple[list[Part], float, tuple[int, int]]:
    """What each prediction adds to the probability of `token`, what is left, and who was right."""
    calibration = texts.calibration
    rest = 1.0
    parts: list[Part] = []
    right = [-1, -1]

    def ask(first: bool) -> None:
        nonlocal rest
        for source, state in zip(texts.extras, side, strict=True):
            if source.first == first and state is not None:
                predicted = source.predict(state)
                if predicted:
                    weights, seen = calibration.extra_weight(source.name, source.start)
                    share = next((share for other, share in predicted if other == token), 0.0)
                    parts.append((source.name, weights, seen, 0, rest * weights[0] * share))
                    rest *= 1.0 - weights[0]

    if texts.extras:
        ask(True)
    for source, kind, bucket, total, ranked in sticks(texts, place):
        if right[source] < 0:
            right[source] = int(ranked[0][0] == token)
        weights = calibration.context if kind else calibration.copy
        seen = calibration.context_seen if kind else calibration.copy_seen
        share = next((count / total for other, count in ranked if other == token), 0.0)
        parts.append((NAMES[source], weights, seen, bucket, rest * weights[bucket] * share))
        rest *= 1.0 - weights[bucket]
        if rest < CUT:
            break
    if texts.extras and rest >= CUT:
        ask(False)
    return parts, rest, (right[0], right[1])


def learn(texts: Texts, place: Place, side: Side, token: int) -> tuple[int, int]:
    """Learns from the token that came at a place.

    Returns:
      for own and shared text: 1 where its first prediction was right, 0 where wrong, -1 where it had none.
    """
    parts, rest, right = _parts(texts, place, side, token)
    texts.calibration.learn([part[1:] for part in parts], rest * UNKNOWN)
    return right


def label(texts: Texts, place: Place, side: Side, token: int) -> str:
    """The name of the source that gives `token` most of its probability."""
    shares: dict[str, float] = {}
    for name, _, _, _, part in _parts(texts, place, side, token)[0]:
        shares[name] = shares.get(name, 0.0) + part
    return max(shares, key=shares.__getitem__)


def step(extras: tuple[Source, ...], side: Side, token: int) -> Side:
    """The states of further sources after one more token."""
    return tuple(
        None if state is None else source.step(state, token) for source, state in zip(extras, side, strict=True)
    )
