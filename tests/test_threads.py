"""Several threads on one model."""

from __future__ import annotations

import collections
import concurrent.futures
import threading

import jaxlookahead as jl
from jaxlookahead import engine
from jaxlookahead.models.dummy import tiny_decoder


def test_two_first_calls_compile_everything_once():
    model, params = tiny_decoder(vocab_size=40, num_layers=1)
    before, together = collections.Counter(engine.TRACES), threading.Barrier(2)

    def work() -> list[list[int]]:
        together.wait()
        return jl.generate(model, params, [[1, 2, 3, 1, 2]], max_new_tokens=6, width=2, rows=1).tokens

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, other = (call.result() for call in [pool.submit(work), pool.submit(work)])
    assert one == other
    new = engine.TRACES - before
    assert new and set(new.values()) == {1}
