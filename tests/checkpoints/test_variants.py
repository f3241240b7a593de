"""Every family's golden checkpoint in its other forms: bfloat16, one file or several, head tied or not."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxlookahead.checkpoints.load import load

from .test_load import FAMILIES, FLOAT32, logits_of

NAMES = [name for name in (*FLOAT32, *FAMILIES) if not name.endswith("bfloat16")]
EMBEDDINGS = ("wte.weight", "embed_in.weight", "embed_tokens.weight")
HEADS = ("lm_head.weight", "embed_out.weight")


def read(directory):
    config = json.loads((directory / "config.json").read_text())
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return config, tensors


def write(directory, config, tensors, *, shards=1):
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names = sorted(tensors)
    places = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for place in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == place}, directory / place)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


def error(logits, exact):
    """Root mean square over the vocabulary, at the median position: where experts nearly tie, rounding chooses one."""
    return np.median(np.sqrt(np.mean((logits - exact) ** 2, axis=1)))


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_costs_what_it_costs_the_reference(golden, name):
    loaded = load(golden / name, dtype="bfloat16", tokenizer=None)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {"bfloat16"}
    with np.load(golden / name / "golden.npz") as stored:
        tokens, exact, reference = (stored[key] for key in ("tokens", "logits", "bfloat16_logits"))
    assert error(logits_of(loaded, tokens), exact) < 1.5 * error(reference, exact)


@pytest.mark.parametrize("name", NAMES)
def test_one_file_or_several(golden, tmp_path, name):
    config, tensors = read(golden / name)
    shards = 1 if (golden / name / "model.safetensors.index.json").exists() else 3
    other = load(write(tmp_path, config, tensors, shards=shards), dtype="float32", tokenizer=None)
    whole = load(golden / name, dtype="float32", tokenizer=None)
    jax.tree.map(np.testing.assert_array_equal, other.params, whole.params)


@pytest.mark.parametrize("name", NAMES)
def test_tied_or_not(golden, tmp_path, name):
    config, tensors = read(golden / name)
    table = next(name for name in tensors if name.endswith(EMBEDDINGS))
    head = next((name for name in tensors if name.endswith(HEADS)), None)
    with np.load(golden / name / "golden.npz") as stored:
        tokens, logits = stored["tokens"], stored["logits"] if head is None else stored["tied_logits"]
    if head is None:
        # A head of its own that holds the same numbers.
        tensors[HEADS[config["model_type"] == "gpt_neox"]] = tensors[table].copy()
    else:
        del tensors[head]
    config["tie_word_embeddings"] = head is not None
    other = load(write(tmp_path, config, tensors), dtype="float32", tokenizer=None)
    assert other.model != load(golden / name, dtype="float32", tokenizer=None).model
    np.testing.assert_allclose(logits_of(other, tokens), logits, atol=1e-4)


@pytest.mark.parametrize("name", ["t5", "t5_gated"])
def test_t5_in_bfloat16_and_in_several_files(golden, tmp_path, name):
    directory = golden / "encoder_decoder" / name
    config, tensors = read(directory)
    loaded = load(write(tmp_path, config, tensors, shards=2), dtype="bfloat16", tokenizer=None)
    whole = load(directory, dtype="bfloat16", tokenizer=None)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, whole.params)
    with np.load(directory / "golden.npz") as stored:
        inputs, tokens, exact, reference = (stored[key] for key in ("inputs", "tokens", "logits", "bfloat16_logits"))
    encoded = dataclasses.replace(loaded, params=loaded.model.with_inputs(loaded.params, [inputs.tolist()]))
    found = logits_of(encoded, tokens)
    assert error(found, exact) < 1.5 * error(reference, exact)
