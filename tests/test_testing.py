from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from jaxlookahead.models.dummy import tiny_decoder
from jaxlookahead.testing import ModelCheckError, check_model


@pytest.mark.parametrize("windows", [(), (3, None), (100, 4)])
def test_F2_built_in_model_passes(windows):
    report = check_model(*tiny_decoder(windows=windows))
    assert report.tree < 1e-5 and report.commit < 1e-5


@dataclasses.dataclass(frozen=True)
class Faulty:
    """Breaks one clause of the contract."""

    inner: object
    fault: str

    @property
    def vocab_size(self):
        return self.inner.vocab_size

    @property
    def max_length(self):
        return self.inner.max_length

    def init_cache(self, batch, slots):
        return self.inner.init_cache(batch, slots)

    def forward(self, params, tokens, positions, mask, cache, start):
        size, slots = tokens.shape[1], mask.shape[-1]
        slot = start + jnp.arange(size)
        if self.fault == "mask":  # causal by slot, prefix from the mask
            causal = jnp.arange(slots) <= slot[:, None]
            mask = jnp.where(jnp.arange(slots) < start, mask, causal)
        if self.fault == "positions":  # whatever was asked
            positions = jnp.broadcast_to(jnp.arange(size) % 7, positions.shape)
        if self.fault == "window":
            mask = mask & (slot[:, None] - jnp.arange(slots) < 24)
        logits, cache = self.inner.forward(params, tokens, positions, mask, cache, start)
        if self.fault == "slot":  # the entry remembers where it was written
            marked = cache["layer_0"]["v"].at[:, :, slots - 8 :].multiply(jnp.where(start > 8, 3.0, 1.0))
            cache = {**cache, "layer_0": {**cache["layer_0"], "v": marked}}
        if self.fault == "shape":
            logits = logits[:, -1:]
        return logits, cache


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("mask", "mask ignored"),
        ("positions", "positions ignored"),
        ("window", "window by slot"),
        ("slot", "cache not movable"),
        ("shape", "logits of shape"),
    ],
)
def test_faults_are_named(fault, words):
    model, params = tiny_decoder()
    with pytest.raises(ModelCheckError, match=words):
        check_model(Faulty(model, fault), params)


def test_what_is_no_model_is_refused():
    model, params = tiny_decoder()

    class LogitsOnly(Faulty):
        def forward(self, *arguments):
            return super().forward(*arguments)[0]

    with pytest.raises(ModelCheckError, match="must return logits and the cache"):
        check_model(LogitsOnly(model, "none"), params)
    with pytest.raises(TypeError, match="is the class Faulty: pass an instance"):
        check_model(Faulty, params)
    with pytest.raises(TypeError, match="a dict without vocab_size, max_length, init_cache, forward"):
        check_model(params, model)
