"""Best-first expansion of the estimates into a tree.

For given estimates, popping the candidate with the largest path probability until the budget is spent gives the tree
with the largest expected number of accepted tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush
from typing import Literal

from jaxlookahead.drafters.calibration import (
    CONTEXTS,
    COPIES,
    DEPTH_BASE,
    LAST_MISS,
    LAST_TOTAL,
    LENGTH_BASE,
    MISS_BUCKET,
    RARITY_STEP,
    TOTAL_BASE,
    UNIQUENESS_STEP,
    rarity_bucket,
    uniqueness_bucket,
)
from jaxlookahead.drafters.estimates import CUT, Place, Side, Texts, label, mover, step
from jaxlookahead.drafters.protocol import Draft
from jaxlookahead.drafters.suffix_index import COUNT, DEPTH, FACTOR, FIRST, LAST, LINK, SHIFT, STRIDE, TOP

Mode = Literal["tree", "parallel", "single"]

# Below `FLOOR / budget`, and below `FLOOR_MOST`, only the likeliest candidate of a place is kept, for when there is
# budget left over: ranking the rest takes more time than they are worth.
FLOOR = 0.1
FLOOR_MOST = 0.005


def grow(
    texts: Texts,
    place: Place,
    budget: int,
    max_depth: int,
    *,
    mode: Mode = "tree",
    side: Side = (),
    eos_ids: Collection[int] = (),
    labels: bool = False,
) -> Draft:
    """Expands the tree below a place.

    Args:
      texts: what to draft from.
      place: where the request stands.
      budget: the most nodes.
      max_depth: the deepest level.
      mode: `tree` lets every node branch, `parallel` only the root, `single` none.
      side: the states of `texts.extras` there.
      eos_ids: tokens that nothing follows.
      labels: whether to name the source of each node, which takes longer.
    """
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    names: list[str] | None = [] if labels else None
    if budget < 1 or max_depth < 1:
        return Draft(tokens, parents, probs, names)
    own, _, shared, shared_root, calibration, (own_success, shared_success), extras = texts
    asked = [(i, source, calibration.extra_weight(source.name, source.start)[0]) for i, source in enumerate(extras)]
    before = [found for found in asked if found[1].first]
    after = [found for found in asked if not found[1].first]
    own_nodes, own_text = own.nodes, own.text
    shared_nodes, shared_text, ring = shared.nodes, shared.text, shared.text_capacity
    copy, context = calibration.copy, calibration.context
    tip = own.position - 1
    shared_total = shared_nodes[(shared_root << SHIFT) + COUNT]
    shared_edges, shards, unigram_key = shared.edges, shared.shards, shared_root * FACTOR
    move = mover(texts)
    floor = min(FLOOR / budget, FLOOR_MOST)
    small = floor * 0.5
    heap: list[tuple[float, int, int, int, int, Place, Side]] = []
    spare: list[tuple[float, int, int, int, int, Place, Side]] = []
    pushed = 0
    parent = -1
    depth = 1
    path = 1.0
    branch = mode != "single"
    while True:
        # Estimates at `place`, scaled by `path`, as in `estimate`.
        node, length, pointer, shared_node, shared_length, shared_pointer = place
        if pointer < 0:
            length = own_nodes[(node << SHIFT) + DEPTH]
        if shared_pointer < 0:
            shared_length = shared_nodes[(shared_node << SHIFT) + DEPTH]
        rest = path
        stop = path * CUT
        if stop < floor < path:
            # What is left over can't lift a candidate above the floor by itself.
            stop = floor
        seen = shared_seen = -1
        found: dict[int, float] = {}
        for i, source, weights in before:
            predicted = source.predict(side[i]) if side[i] is not None else ()
            if predicted:
                part = rest * weights[0]
                rest -= part
                for token, share in predicted:
                    found[token] = found.get(token, 0.0) + part * share
        while rest >= stop:
            if length >= shared_length:
                if not length:
                    break
                at = node << SHIFT
                count = own_nodes[at + COUNT]
                if own_nodes[at + LAST] == tip:
                    count -= 1
                if pointer >= 0:
                    leaf = not own_nodes[at + FIRST]
                    bucket = LENGTH_BASE[length] + own_success
                    if count > 1:
                        bucket += UNIQUENESS_STEP * uniqueness_bucket(count, leaf)
                    if length <= 3:
                        key = unigram_key + own_text[pointer]
                        unigram = shared_edges[key % shards].get(key)
                        seen_count = shared_nodes[(unigram << SHIFT) + COUNT] if unigram else 0
                        bucket += RARITY_STEP * rarity_bucket(seen_count, shared_total)
                    weight = copy[bucket]
                    part = rest * weight
                    token = own_text[pointer + 1]
                    found[token] = found.get(token, 0.0) + part
                    rest -= part
                    pointer = -1
                    if leaf:
                        seen = count
                        node = own_nodes[at + LINK]
                        length = own_nodes[(node << SHIFT) + DEPTH]
                    else:
                        length = own_nodes[at + DEPTH]
                    continue
                if count > 0 and count != seen:
                    child = own_nodes[at + TOP]
                    if child:
                        miss = count - own_nodes[(child << SHIFT) + COUNT]
                        bucket = DEPTH_BASE[length] + TOTAL_BASE[count if count < LAST_TOTAL else LAST_TOTAL]
                        if miss > 0:
                            bucket += MISS_BUCKET[miss if miss < LAST_MISS else LAST_MISS]
                        weight = context[bucket]
                        part = rest * weight / count
                        if own_nodes[at + TOP + 1]:
                            for child in own_nodes[at + TOP : at + STRIDE]:
                                if not child:
                                    break
                                child <<= SHIFT
                                value = part * own_nodes[child + COUNT]
                                if value < small:
                                    break
                                token = own_nodes[child]
                                found[token] = found.get(token, 0.0) + value
                        else:
                            token = own_nodes[child << SHIFT]
                            found[token] = found.get(token, 0.0) + part * (count - miss)
                        rest -= rest * weight
                        seen = count
                node = own_nodes[at + LINK]
                length -= 1
            else:
                at = shared_node << SHIFT
                count = shared_nodes[at + COUNT]
                if shared_pointer >= 0:
                    leaf = not shared_nodes[at + FIRST]
                    bucket = COPIES + LENGTH_BASE[shared_length] + shared_success
                    if count > 1:
                        bucket += UNIQUENESS_STEP * uniqueness_bucket(count, leaf)
                    if shared_length <= 3:
                        key = unigram_key + shared_text[shared_pointer % ring]
                        unigram = shared_edges[key % shards].get(key)
                        seen_count = shared_nodes[(unigram << SHIFT) + COUNT] if unigram else 0
                        bucket += RARITY_STEP * rarity_bucket(seen_count, shared_total)
                    weight = copy[bucket]
                    part = rest * weight
                    token = shared_text[(shared_pointer + 1) % ring]
                    found[token] = found.get(token, 0.0) + part
                    rest -= part
                    shared_pointer = -1
                    if leaf:
                        shared_seen = count
                        shared_node = shared_nodes[at + LINK]
                        shared_length = shared_nodes[(shared_node << SHIFT) + DEPTH]
                    else:
                        shared_length = shared_nodes[at + DEPTH]
                    continue
                if count != shared_seen:
                    child = shared_nodes[at + TOP]
                    if child:
                        miss = count - shared_nodes[(child << SHIFT) + COUNT]
                        bucket = (
                            CONTEXTS
                            + DEPTH_BASE[shared_length]
                            + TOTAL_BASE[count if count < LAST_TOTAL else LAST_TOTAL]
                        )
                        if miss > 0:
                            bucket += MISS_BUCKET[miss if miss < LAST_MISS else LAST_MISS]
                        weight = context[bucket]
                        part = rest * weight / count
                        if shared_nodes[at + TOP + 1]:
                            for child in shared_nodes[at + TOP : at + STRIDE]:
                                if not child:
                                    break
                                child <<= SHIFT
                                value = part * shared_nodes[child + COUNT]
                                if value < small:
                                    break
                                token = shared_nodes[child]
                                found[token] = found.get(token, 0.0) + value
                        else:
                            token = shared_nodes[child << SHIFT]
                            found[token] = found.get(token, 0.0) + part * (count - miss)
                        rest -= rest * weight
                        shared_seen = count
                shared_node = shared_nodes[at + LINK]
                shared_length -= 1
        if rest >= stop:
            for i, source, weights in after:
                predicted = source.predict(side[i]) if side[i] is not None else ()
                if predicted:
                    part = rest * weights[0]
                    rest -= part
                    for token, share in predicted:
                        found[token] = found.get(token, 0.0) + part * share
        above_floor = False
        if branch:
            for token, value in found.items():
                if value >= floor:
                    pushed += 1
                    heappush(heap, (-value, pushed, token, parent, depth, place, side))
                    above_floor = True
        if not above_floor and found:
            token = max(found, key=found.__getitem__)
            pushed += 1
            if found[token] >= floor:
                heappush(heap, (-found[token], pushed, token, parent, depth, place, side))
            else:
                spare.append((-found[token], pushed, token, parent, depth, place, side))
        if parent < 0:
            branch = mode == "tree"
        while heap or spare:
            if not heap:
                heap, spare = spare, heap
                heapify(heap)
            value, _, token, above, depth, place, side = heappop(heap)
            parent = len(tokens)
            tokens.append(token)
            parents.append(above)
            probs.append(-value if value > -1.0 else 1.0)
            if names is not None:
                names.append(label(texts, place, side, token))
            if parent + 1 == budget:
                return Draft(tokens, parents, probs, names)
            if depth < max_depth and token not in eos_ids:
                break
        else:
            return Draft(tokens, parents, probs, names)
        depth += 1
        path = -value
        place = move(place, token)
        if extras:
            side = step(extras, side, token)
