"""Processors against values that `transformers` computed (see `tests/golden/make_processors.py`)."""

import json
import pathlib

import numpy as np

from jaxlookahead.sampling import Sampling

from .helpers import rows, run_process


def _sampling(text):
    settings = json.loads(text)
    settings["logit_bias"] = {int(token): value for token, value in settings.get("logit_bias", {}).items()}
    return Sampling(**settings)


def test_processors_equal_those_of_transformers():
    golden = np.load(pathlib.Path(__file__).parents[1] / "golden" / "processors.npz")
    samplings = [_sampling(text) for text in golden["settings"]]
    got = np.asarray(
        run_process(
            rows(samplings, vocab_size=golden["logits"].shape[1]),
            golden["histories"],
            golden["prompt_lengths"],
            golden["lengths"],
            golden["logits"],
        )
    )
    for i, text in enumerate(golden["settings"]):
        np.testing.assert_array_equal(got[i] == -np.inf, golden["outputs"][i] == -np.inf, err_msg=str(text))
        np.testing.assert_allclose(got[i], golden["outputs"][i], rtol=2e-6, err_msg=str(text))
    changed = (got != golden["logits"]).any(-1)
    assert changed.mean() > 0.6
