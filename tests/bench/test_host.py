from __future__ import annotations

import itertools
import types

import numpy as np
import pytest

from jaxlookahead.bench.host import Recorder, Step, measure
from jaxlookahead.engine import Engine
from jaxlookahead.models.dummy import tiny_decoder


def test_gap_is_draft_dispatch_and_rest():
    recorder = Recorder()
    recorder.steps = [
        Step(ready=1.000, collect_end=1.001),
        Step(
            draft_begin=1.002, draft_end=1.005, dispatch_begin=1.006, dispatch_end=1.008, collect_begin=1.009, ready=2
        ),
    ]
    recorder.processor = [0.0, 0.004]
    times = recorder.times()
    got = [getattr(times, name)[0] for name in ("gap", "draft", "dispatch", "rest", "beside", "host", "processor")]
    assert got == pytest.approx([8, 3, 2, 3, 1, 8, 4])


def test_every_step_is_noted_in_order_and_engines_are_left_alone():
    before = Engine.dispatch, Engine.collect
    model, params = tiny_decoder()
    loaded = types.SimpleNamespace(model=model, params=params)
    times, steps = measure(loaded, [[1, 2, 3, 1, 2]], rows=1, width=4, max_new_tokens=12, warm=[[1, 2, 3, 4, 5]])
    assert (Engine.dispatch, Engine.collect) == before
    assert len(steps) == len(times.gap) + 1 > 3
    for one, next_one in itertools.pairwise(steps):
        assert one.dispatch_begin < one.dispatch_end <= one.collect_begin < one.collect_end <= next_one.dispatch_begin
        assert one.dispatch_begin < one.ready
    assert np.all(times.gap > 0) and np.all(times.draft < times.gap + 1e-6)
