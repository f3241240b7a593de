"""Fixtures: small random models, and the real data where it is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest

from jaxlookahead.models.dummy import tiny_decoder

# How long an example takes says nothing on a busy machine.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "data"


@pytest.fixture(scope="module", autouse=True)
def drop_compiled_programs():
    """Programs of many models add up to gigabytes over a run."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def tiny():
    """A small random decoder: `(model, params)`, vocabulary 50."""
    return tiny_decoder(vocab_size=50)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Ragged prompts for `tiny`."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 50, n).tolist() for n in (1, 5, 40, 17, 100, 3)]


@pytest.fixture(scope="session")
def shared_rows():
    """Reads a file of real data, by name; skips the test where the project stands alone."""

    def read(name: str) -> list[dict]:
        path = SHARED / name
        if not path.exists():
            pytest.skip(f"{name} is not here")
        with path.open() as file:
            return [json.loads(line) for line in file]

    return read
