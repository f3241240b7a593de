"""Fixtures: small random models, and the real data where it is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "data"


@pytest.fixture(scope="session")
def tiny():
    """A small random decoder: `(model, params)`, vocabulary 50."""
    return make_tiny()


def make_tiny(seed: int = 0, **options):
    from flax import nnx

    from jaxlookahead.models.decoder import Decoder, DecoderConfig
    from jaxlookahead.models.flax_nnx import from_nnx

    shape = dict(vocab_size=50, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_size=8)
    shape |= dict(intermediate_size=64, max_length=512) | options
    return from_nnx(Decoder(DecoderConfig(**shape), rngs=nnx.Rngs(seed)))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Ragged prompts for `tiny`."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 50, n).tolist() for n in (1, 5, 40, 17, 100, 3)]


def shared_rows(name: str) -> list[dict]:
    """Rows of a file of real data; skips the test where the project stands alone."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not here")
    with path.open() as file:
        return [json.loads(line) for line in file]
