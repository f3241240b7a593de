import struct

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxlookahead.checkpoints.gguf import hf_config, tensors
from jaxlookahead.checkpoints.gguf_file import GGUFFile, check_formats
from jaxlookahead.checkpoints.tokenizer import from_gguf


def string(text):
    return struct.pack("<Q", len(text)) + text


@pytest.fixture
def example(tmp_path):
    path = tmp_path / "example.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_int64("a.long", -(2**40))
    writer.add_array("a.words", ["x", "ü", ""])
    writer.add_array("a.numbers", [1, -2, 3])
    matrix = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    writer.add_tensor("matrix", matrix)
    writer.add_tensor("cube", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    writer.add_tensor("vector", np.arange(6, dtype=np.float32))
    for kind in ("Q4_1", "Q8_0", "F16", "BF16"):
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(kind, gguf.quantize(matrix, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, matrix


def test_reads_what_the_package_writes(example):
    path, matrix = example
    with GGUFFile(path) as file:
        assert file.metadata["a.number"] == 7 and file.metadata["a.long"] == -(2**40)
        assert file.metadata["a.flag"] is True and file.metadata["a.float"] == 0.5
        assert file.metadata["a.words"] == ["x", "ü", ""]
        np.testing.assert_array_equal(file.metadata["a.numbers"], [1, -2, 3])
        np.testing.assert_array_equal(file.read("matrix"), matrix)
        np.testing.assert_array_equal(file.read("cube"), np.arange(24).reshape(2, 3, 4))
        np.testing.assert_array_equal(file.read("vector"), np.arange(6))
        for kind in ("Q4_1", "Q8_0", "F16", "BF16"):
            number = gguf.GGMLQuantizationType[kind]
            expected = gguf.dequantize(gguf.quantize(matrix, number), number)
            np.testing.assert_array_equal(file.read(kind), expected)


def test_rows_go_where_order_says_whatever_the_chunk(example, monkeypatch):
    path, matrix = example
    order = np.array([3, 0, 4, 1, 2])
    expected = np.empty_like(matrix)
    expected[order] = matrix
    for chunk in (1, 64, 150, 1 << 20):
        monkeypatch.setattr("jaxlookahead.checkpoints.gguf_file._CHUNK", chunk)
        with GGUFFile(path) as file:
            np.testing.assert_array_equal(file.read("matrix", order=order), expected)
            np.testing.assert_array_equal(file.read("vector", order=[5, 4, 3, 2, 1, 0]), np.arange(6)[::-1])


def test_k_formats_agree_with_the_package(tmp_path):
    rng = np.random.default_rng(1)
    path = tmp_path / "k.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    blocks = {}
    for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        number = gguf.GGMLQuantizationType[kind]
        size = gguf.GGML_QUANT_SIZES[number][1]
        # Any bytes are blocks; small exponents keep the scales finite.
        blocks[kind] = rng.integers(0, 60, (3, 2 * size), np.uint8)
        writer.add_tensor(kind, blocks[kind], raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path) as file:
        check_formats(file)
        for kind, raw in blocks.items():
            assert file.tensors[kind].shape == (3, 512)
            expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
            np.testing.assert_array_equal(file.read(kind), expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not begin with"),
        (b"GG", "does not begin with"),
        (b"PK\x03\x04 a zip file", "does not begin with"),
        (b"GGUF", "cut short"),
        (b"GGUF" + struct.pack("<I", 1), "version 1; supported: 2, 3"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string(b"k") + struct.pack("<I", 77), "unknown type 77"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string(b"k") + struct.pack("<IIQ", 9, 4, 2**60),
            "cut short",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string(b"k") + struct.pack("<IIQ", 9, 9, 1),
            "arrays of type 9",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + string(b"t") + struct.pack("<I", 99), "99 dimensions"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + string(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0),
            r"shape \(0,\)",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + string(b"t") + struct.pack("<IQIQ", 1, 9, 999, 0),
            "format 999",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + string(b"t") + struct.pack("<IQIQ", 1, 9, 8, 0),
            "no multiple of 32",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + string(b"t") + struct.pack("<IQIQ", 1, 2**50, 0, 0),
            "cut short",
        ),
    ],
)
def test_foreign_and_damaged_files_give_one_error(tmp_path, content, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


def test_file_cut_in_its_last_tensor_names_it(example):
    path, _ = example
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="cut short: the tensor 'BF16' ends at byte"):
        GGUFFile(path)


def test_tensor_named_twice(tmp_path):
    info = string(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)
    path = tmp_path / "twice.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + info + info + bytes(64))
    with pytest.raises(ValueError, match="tensor 't' twice"):
        GGUFFile(path)


def test_integer_tensors_are_refused_by_name(tmp_path):
    path = tmp_path / "integers.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("counts", np.arange(4, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(path) as file, pytest.raises(ValueError, match="I32 of the tensor 'counts'"):
        check_formats(file)


def test_missing_file():
    with pytest.raises(FileNotFoundError):
        GGUFFile("nothing-here.gguf")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_raises_anything_but_value_error(data, write_gguf, tmp_path):
    path = tmp_path / "fuzz.gguf"
    if not path.exists():

        def small_vocabulary(metadata, arrays):
            tokens = [chr(97 + i) for i in range(26)] + ["ab"] + [f"<{i}>" for i in range(69)]
            metadata["tokenizer.ggml.model"] = "gpt2"
            metadata["tokenizer.ggml.pre"] = "smollm"
            metadata["tokenizer.ggml.tokens"] = tokens
            metadata["tokenizer.ggml.token_type"] = [1] * 27 + [3] * 69
            metadata["tokenizer.ggml.merges"] = ["a b"]
            metadata["tokenizer.ggml.eos_token_id"] = 2

        write_gguf("llama_linear", small_vocabulary).rename(path)
    content = bytearray(path.read_bytes())
    header = 5000
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    try:
        with GGUFFile(damaged) as file:
            for _ in tensors(file, hf_config(file)):
                pass
            from_gguf(damaged, file.metadata)
    except ValueError:
        pass
