from __future__ import annotations

import pytest

from jaxlookahead.drafters.protocol import Draft
from jaxlookahead.width import Costs, CostTable, WidthController, buckets


def draft(*probs):
    return Draft(tokens=list(range(len(probs))), parents=list(range(-1, len(probs) - 1)), probs=list(probs))


@pytest.mark.parametrize(("width", "widths"), [(1, [1]), (2, [1, 2]), (13, [1, 2, 4, 8, 13]), (16, [1, 2, 4, 8, 16])])
def test_buckets(width, widths):
    assert buckets(width) == widths


def measure(controller, costs, rows=1, slots=128):
    for width, seconds in costs.items():
        for _ in range(4):
            controller.costs.measured(rows, width, slots, seconds)


def test_follows_measured_cost():
    controller = WidthController(8, Costs(8))
    measure(controller, {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.7})
    assert controller.choose([draft(*[0.9**i for i in range(1, 8)])], 128) == 8
    assert controller.choose([draft(0.9, 0.8, 0.7, 0.1, 0.1, 0.1, 0.1)], 128) == 4
    assert controller.choose([draft(0.05, 0.01)], 128) == 1
    assert controller.choose([Draft()], 128) == 1
    # Rows share the cost: what doesn't pay for one pays for the other.
    measure(controller, {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.7}, rows=2)
    assert controller.choose([draft(0.05, 0.01), draft(0.9, 0.8, 0.7)], 128) == 4
    assert controller.choose([None, draft(0.9, 0.8, 0.7)], 128) == 4


def test_compilation_is_not_a_cost():
    controller = WidthController(2, Costs(8))
    controller.costs.measured(1, 2, 128, 60.0)
    controller.costs.measured(1, 1, 128, 1.0)
    measure(controller, {1: 1.0})
    assert controller.choose([draft(0.9)], 128) == 2


def test_one_slow_step_is_no_reason():
    table = CostTable(8)
    for seconds in (1.0, 1.0, 1.0, 50.0, 1.0):
        table.add(4, seconds)
    assert table.estimate(4) == 1.0
    assert table.estimate(8) == pytest.approx(2 / 1.5)


def test_learns_where_the_drafter_gives_no_probabilities():
    controller = WidthController(4, Costs(8))
    measure(controller, {1: 1.0, 2: 1.3, 4: 1.5})
    bare = Draft(tokens=[1, 2, 3], parents=[-1, 0, 1])
    for _ in range(100):
        controller.verified(bare, [])
    assert controller.choose([bare], 128) == 1
    for _ in range(100):  # a bad patch is forgotten
        controller.verified(bare, [0, 1, 2])
    assert controller.choose([bare], 128) == 4


def test_acceptance_outlives_the_call():
    costs = Costs(8)
    first = WidthController(4, costs, "a")
    measure(first, {1: 1.0, 2: 1.3, 4: 1.5})
    bare = Draft(tokens=[1, 2, 3], parents=[-1, 0, 1])
    for _ in range(100):
        first.verified(bare, [])
    assert WidthController(4, costs, "a").choose([bare], 128) == 1
    # Of another kind nothing is known.
    assert WidthController(4, costs, "b").choose([bare], 128) > 1
    # It is not given up for ever, nor tried all the time.
    later = WidthController(4, costs, "a")
    tries = []
    for _ in range(3000):
        width = later.choose([bare], 128)
        later.verified(Draft(tokens=bare.tokens[: width - 1], parents=bare.parents[: width - 1]), [])
        tries.append(width > 1)
    assert 10 < sum(tries) < 400
