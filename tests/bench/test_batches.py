from __future__ import annotations

from jaxlookahead.bench.batches import METHODS, measure, mixed_lengths
from jaxlookahead.models.dummy import tiny_decoder


def test_lengths_vary_as_asked_and_do_not_come_in_order():
    lengths = mixed_lengths(64, 10, 100)
    assert (min(lengths), max(lengths)) == (10, 100) and lengths != sorted(lengths)
    assert sorted(lengths)[32] in range(28, 36)


def test_all_methods_decode_the_same_tokens_and_static_batches_wait_for_the_longest():
    model, params = tiny_decoder()
    prompts = [[i, 2, 3] for i in range(1, 5)]
    table = {row["method"]: row for row in measure(model, params, prompts, [2, 20, 2, 2], rows=[2])}
    assert tuple(table) == METHODS
    assert {row["tokens"] for row in table.values()} == {26} and not any(row["different"] for row in table.values())
    # Static: 20 steps for the first two requests and 2 for the others; refilled, the short ones share the long one's.
    assert table["plain, static"]["steps"] == 22 and table["plain"]["steps"] == 20
    assert table["plain"]["to_plain"] == 1 and table["drafted"]["steps"] <= 20
