import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxlookahead.checkpoints import huggingface
from jaxlookahead.checkpoints.load import load


@pytest.fixture
def copy(golden, tmp_path):
    def make(name):
        shutil.copytree(golden / name, tmp_path / name)
        return tmp_path / name

    return make


def test_bfloat16_is_read_as_bfloat16(tmp_path):
    values = np.linspace(-2, 2, 12).reshape(3, 4).astype(ml_dtypes.bfloat16)
    save_file({"a": values, "b": np.ones(3, np.float16)}, tmp_path / "model.safetensors")
    found = dict(huggingface.tensors(tmp_path))
    assert found["a"].dtype == ml_dtypes.bfloat16 and found["b"].dtype == np.float16
    np.testing.assert_array_equal(found["a"], values)


def test_shards_are_found_by_the_index(golden):
    found = huggingface.shards(golden / "mistral")
    assert len(found) == 3 and all(file.is_file() for file in found)
    names = [name for part in found.values() for name in part]
    assert len(names) == len(set(names)) == 21


def test_directory_without_config(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"pass the GGUF file itself: .*model\.gguf"):
        load(tmp_path)


def test_pickles_are_refused_with_the_remedy(copy):
    path = copy("qwen2")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickles only \(pytorch_model\.bin\).*safe_serialization"):
        load(path, tokenizer=None)


def test_no_weights(copy):
    path = copy("qwen2")
    (path / "model.safetensors").rename(path / "adapter.safetensors")
    with pytest.raises(ValueError, match=r"holds no weights.*adapter\.safetensors"):
        load(path, tokenizer=None)


def test_missing_shard_is_named(copy):
    path = copy("mistral")
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-00002-of-00003\.safetensors.*download"):
        load(path, tokenizer=None)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\xff" * 64, None])
def test_truncated_or_foreign_shard_is_named(copy, content):
    path = copy("mistral")
    shard = path / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8] if content is None else content)
    with pytest.raises(ValueError, match=r"model-00003-of-00003\.safetensors is not a whole safetensors file"):
        load(path, tokenizer=None)


def test_shard_with_other_tensors_than_the_index_says(copy):
    path = copy("mistral")
    index = json.loads((path / huggingface.INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00003.safetensors"
    (path / huggingface.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lacks model\.extra\.weight"):
        load(path, tokenizer=None)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", 7])
def test_index_may_name_files_of_the_directory_alone(copy, file):
    path = copy("mistral")
    (path / huggingface.INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ValueError, match="not a file's name"):
        load(path, tokenizer=None)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": 3}', "{}", "[" * 10_000])
def test_damaged_index(copy, content):
    path = copy("mistral")
    (path / huggingface.INDEX).write_text(content)
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        load(path, tokenizer=None)


@pytest.mark.parametrize("content", [b"", b"not json", b"[1]", b"\xff\xfe"])
def test_damaged_config(copy, content):
    path = copy("qwen2")
    (path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        load(path, tokenizer=None)


def test_integer_tensors_are_refused_by_name(copy):
    path = copy("qwen2")
    arrays = dict(huggingface.tensors(path)) | {"model.norm.weight": np.ones(32, np.int8)}
    save_file(arrays, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has dtype I8"):
        load(path, tokenizer=None)


def test_refusals_come_before_any_tensor_is_read(copy, monkeypatch):
    path = copy("qwen2")
    read = []
    monkeypatch.setattr(huggingface, "tensors", lambda *_: read.append(1) or iter(()))
    with pytest.raises(ValueError, match="no tokenizer"):
        load(path)
    assert not read
