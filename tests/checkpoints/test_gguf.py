import numpy as np
import pytest

from jaxlookahead.checkpoints.gguf import hf_config, hf_name, tensors
from jaxlookahead.checkpoints.gguf_file import GGUFFile
from jaxlookahead.checkpoints.load import load


def config_of(path):
    with GGUFFile(path) as file:
        return hf_config(file)


def test_configuration_of_each_architecture(write_gguf):
    llama = config_of(write_gguf("llama_linear"))
    assert llama["model_type"] == "llama" and llama["attention_bias"] and llama["mlp_bias"]
    assert llama["rope_scaling"] == {"rope_type": "linear", "factor": 4.0} and llama["tie_word_embeddings"]
    mistral = config_of(write_gguf("mistral"))
    assert (mistral["model_type"], mistral["sliding_window"]) == ("mistral", 8)
    qwen3 = config_of(write_gguf("qwen3"))
    assert (qwen3["model_type"], qwen3["head_dim"]) == ("qwen3", 16) and not qwen3["tie_word_embeddings"]
    assert qwen3["rope_scaling"]["original_max_position_embeddings"] == 32


def test_llama3_factors_tell_their_parameters(write_gguf):
    scaling = config_of(write_gguf("llama3"))["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }


def test_other_rope_factors_are_refused(write_gguf):
    def change(_, arrays):
        arrays["rope_freqs.weight"] = np.array([1, 5, 2, 8], np.float32)

    with pytest.raises(ValueError, match=r"'rope_freqs.weight' is not a Llama 3 scaling"):
        config_of(write_gguf("llama3", change))


def test_old_linear_scaling_key(write_gguf):
    def change(metadata, _):
        del metadata["llama.rope.scaling.type"]
        metadata["llama.rope.scale_linear"] = metadata.pop("llama.rope.scaling.factor")

    assert config_of(write_gguf("llama_linear", change))["rope_scaling"]["factor"] == 4.0


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("qwen2", "qwen2.rope.scaling.type", "longrope", "rope.scaling.type 'longrope'"),
        ("llama3", "llama.expert_count", 8, "llama.expert_count=8 is not supported"),
        ("llama3", "llama.attention.scale", 0.5, "llama.attention.scale=0.5"),
        ("qwen3", "qwen3.attention.sliding_window", 64, "sliding_window"),
        ("qwen3", "qwen3.attention.value_length", 8, "value_length 8"),
        ("llama3", "llama.rope.dimension_count", 4, "rope.dimension_count 4"),
        ("qwen3", "qwen3.rope.dimension_count", 8, "rope.dimension_count 8"),
        ("qwen2", "qwen2.embedding_length", "wide", "embedding_length is 'wide'"),
        ("qwen2", "qwen2.attention.head_count", 0, "head_count is 0"),
        ("qwen2", "qwen2.attention.head_count_kv", [2, 1], "head_count_kv differs between layers"),
        ("llama_linear", "llama.attention.sliding_window", 8, "biases together with a sliding window"),
        ("qwen3", "qwen3.rope.scaling.yarn_log_multiplier", 0.1, "yarn_log_multiplier"),
    ],
)
def test_unsupported_options_are_refused_by_name(write_gguf, name, key, value, message):
    path = write_gguf(name, lambda metadata, _: metadata.update({key: value}))
    with pytest.raises(ValueError, match=message) as caught:
        load(path, tokenizer=None)
    assert str(path) in str(caught.value)


def test_unknown_architecture_is_refused_by_name(tmp_path):
    import gguf

    path = tmp_path / "mamba.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="'mamba' is not supported; supported: llama, qwen2, qwen3, gemma3"):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _, a: a.pop("token_embd.weight"), "lacks the tensor 'token_embd.weight'"),
        (lambda _, a: a.pop("blk.1.ffn_up.weight"), "lacks 1 tensors: model.layers.1.mlp.up_proj.weight"),
        (
            lambda _, a: a.update({"blk.0.attn_rot.weight": np.zeros((4, 4), np.float32)}),
            "'blk.0.attn_rot.weight'",
        ),
        (lambda _, a: a.update({"blk.0.attn_q.weight": np.zeros((30, 32), np.float32)}), "attn_q.weight"),
        (lambda _, a: a.pop("blk.0.attn_output.bias"), "alone are not supported"),
        (lambda m, _: m.pop("llama.block_count"), "llama.block_count is None"),
    ],
)
def test_contradictions_give_one_error(write_gguf, change, message):
    path = write_gguf("llama_linear", change)
    with pytest.raises(ValueError, match=message) as caught:
        load(path, tokenizer=None)
    assert str(path) in str(caught.value)


def test_query_rows_are_unpermuted_in_llama_alone(golden, write_gguf):
    from jaxlookahead.checkpoints import huggingface

    for name in ("llama3", "llama_linear", "mistral", "qwen2", "qwen3"):
        expected = dict(huggingface.tensors(golden / name))
        with GGUFFile(write_gguf(name)) as file:
            found = dict(tensors(file, hf_config(file)))
        assert found.keys() == expected.keys()
        for key in expected:
            np.testing.assert_array_equal(found[key], expected[key], err_msg=key)


def test_tensor_names():
    assert hf_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("rope_freqs.weight") is None
    for unknown in ("blk.0.ffn_gate_exps.weight", "token_embd", "blk.x.attn_q.weight", "output_b.weight"):
        with pytest.raises(ValueError, match="has no place"):
            hf_name(unknown)
