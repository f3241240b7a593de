"""`load` on small checkpoints whose logits the reference implementation computed."""

import gc
import json
import os
import shutil
import subprocess
import sys
import weakref

import gguf as gguf_package
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlookahead.checkpoints import huggingface
from jaxlookahead.checkpoints import load as load_module
from jaxlookahead.checkpoints.load import find, load

FLOAT32 = ("llama3", "llama_linear", "llama_bfloat16", "mistral", "qwen2", "qwen3")
FAMILIES = (
    "gemma3_gguf",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3",
    "olmo2",
    "mixtral",
    "qwen3_moe",
    "gpt2",
    "gpt_neox",
    "gpt_neox_sequential",
    "opt",
    "opt_after",
)


def logits_of(loaded, tokens):
    count = len(tokens)
    mask = jnp.tril(jnp.ones((1, count, count), bool))
    logits, _ = loaded.model.forward(
        loaded.params,
        jnp.asarray(tokens)[None],
        jnp.arange(count, dtype=jnp.int32)[None],
        mask,
        loaded.model.init_cache(1, count),
        jnp.int32(0),
    )
    return np.asarray(logits[0], np.float32)


def goldens_of(directory):
    with np.load(directory / "golden.npz") as stored:
        return stored["tokens"], stored["logits"]


@pytest.mark.parametrize("name", FLOAT32 + FAMILIES)
def test_directory_gives_reference_logits(golden, name):
    loaded = load(golden / name, dtype="float32", tokenizer=None)
    tokens, logits = goldens_of(golden / name)
    np.testing.assert_allclose(logits_of(loaded, tokens), logits, atol=1e-4)
    assert loaded.eos_ids == (2,)


@pytest.mark.parametrize("name", [*FLOAT32, "gemma3_gguf"])
def test_gguf_gives_reference_logits(golden, write_gguf, name):
    loaded = load(write_gguf(name), dtype="float32", tokenizer=None)
    tokens, logits = goldens_of(golden / name)
    np.testing.assert_allclose(logits_of(loaded, tokens), logits, atol=1e-4)


def test_bfloat16_checkpoint_computes_in_bfloat16(golden):
    loaded = load(golden / "llama_bfloat16", dtype="bfloat16", tokenizer=None)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype("bfloat16")}
    tokens, exact = goldens_of(golden / "llama_bfloat16")
    with np.load(golden / "llama_bfloat16" / "golden.npz") as stored:
        reference = stored["bfloat16_logits"]
    # Rounding to 8 bits after every product has no single right result: it may cost us what it costs the
    # reference implementation, with some room for a different order of sums.
    ours, theirs = (np.sqrt(np.mean((x - exact) ** 2)) for x in (logits_of(loaded, tokens), reference))
    assert ours < 1.3 * theirs


def test_quantized_gguf_equals_its_dequantized_values(golden, write_gguf):
    kinds = {
        "blk.0.attn_q.weight": gguf_package.GGMLQuantizationType.Q8_0,
        "blk.0.attn_k.weight": gguf_package.GGMLQuantizationType.Q4_1,
        "blk.0.ffn_up.weight": gguf_package.GGMLQuantizationType.F16,
        "blk.1.ffn_gate.weight": gguf_package.GGMLQuantizationType.BF16,
    }
    rounded = {}

    def round_all(_, arrays):
        for name, kind in kinds.items():
            rounded[name] = gguf_package.dequantize(gguf_package.quantize(arrays[name], kind), kind)

    quantized = load(write_gguf("llama3", round_all, kinds), dtype="float32", tokenizer=None)
    plain = load(write_gguf("llama3", lambda _, a: a.update(rounded)), dtype="float32", tokenizer=None)
    jax.tree.map(np.testing.assert_array_equal, quantized.params, plain.params)


def test_default_dtype_is_float32_on_cpu(golden):
    assert jax.default_backend() == "cpu"
    loaded = load(golden / "llama_bfloat16", tokenizer=None)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded.params)} == {"float32"}


def test_unpacks_as_model_params_tokenizer(golden):
    marker = object()
    model, params, tokenizer = load(golden / "qwen2", tokenizer=marker)
    assert tokenizer is marker and model.vocab_size == 96 and jax.tree.leaves(params)


def test_parameters_go_to_the_sharding_of_their_path(golden):
    asked = []
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def sharding(path, shape):
        asked.append((path, shape))
        return place

    params = load(golden / "qwen3", sharding=sharding, tokenizer=None).params
    leaves = jax.tree_util.tree_leaves_with_path(params)
    assert sorted(asked) == sorted((tuple(key.key for key in path), leaf.shape) for path, leaf in leaves)


_SHARDED = """
import sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlookahead.checkpoints.load import load

mesh = Mesh(np.array(jax.devices()), ("model",))

def place(path, shape):
    axis = max(range(len(shape)), key=lambda i: (shape[i] % 4 == 0, shape[i]))
    return NamedSharding(mesh, PartitionSpec(*["model" if i == axis else None for i in range(len(shape))]))

first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
plain = load(sys.argv[1], dtype="float32", sharding=first, tokenizer=None).params
sharded = load(sys.argv[1], dtype="float32", sharding=place, tokenizer=None).params
for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(sharded), strict=True):
    np.testing.assert_array_equal(one, other)
    assert len(other.sharding.device_set) == 4
    assert {shard.data.size for shard in other.addressable_shards} == {other.size // 4}
one = load(sys.argv[1], sharding=jax.sharding.SingleDeviceSharding(jax.devices()[3]), tokenizer=None).params
assert all(leaf.devices() == {jax.devices()[3]} for leaf in jax.tree.leaves(one))
"""


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_parameters_are_sharded_over_devices(golden, write_gguf, kind):
    source = golden / "llama3" if kind == "directory" else write_gguf("llama3")
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    environment = {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(golden.parents[1]),
    }
    command = [sys.executable, "-c", _SHARDED, str(source)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_host_holds_one_tensor_beyond_the_parameters(golden, write_gguf, monkeypatch, kind):
    from jaxlookahead.checkpoints import gguf

    module = huggingface if kind == "directory" else gguf
    source = golden / "llama3" if kind == "directory" else write_gguf("llama3")
    alive: set[int] = set()
    most = 0
    read = module.tensors

    def counted(*args):
        nonlocal most
        for name, array in read(*args):
            key = id(array)
            alive.add(key)
            weakref.finalize(array, alive.discard, key)
            most = max(most, len(alive))
            yield name, array
            del array

    monkeypatch.setattr(module, "tensors", counted)
    load(source, tokenizer=None)
    assert most == 1


def test_traced_host_memory_stays_below_parameters_and_one_tensor(tmp_path):
    import tracemalloc

    from safetensors.numpy import save_file

    hidden, layers, vocabulary = 64, 12, 4096
    config = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }
    square, wide = (hidden, hidden), (4 * hidden, hidden)
    arrays = {"model.norm.weight": np.ones(hidden, np.float32)}
    for name in ("model.embed_tokens", "lm_head"):
        arrays[f"{name}.weight"] = np.ones((vocabulary, hidden), np.float32)
    for i in range(layers):
        prefix = f"model.layers.{i}"
        for name in "qkvo":
            arrays[f"{prefix}.self_attn.{name}_proj.weight"] = np.ones(square, np.float32)
        for name, shape in (("gate", wide), ("up", wide), ("down", wide[::-1])):
            arrays[f"{prefix}.mlp.{name}_proj.weight"] = np.ones(shape, np.float32)
        for name in ("input_layernorm", "post_attention_layernorm"):
            arrays[f"{prefix}.{name}.weight"] = np.ones(hidden, np.float32)
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    total = sum(array.nbytes for array in arrays.values())
    largest = max(array.nbytes for array in arrays.values())
    del arrays
    load(tmp_path, tokenizer=None)
    gc.collect()
    tracemalloc.start()
    load(tmp_path, tokenizer=None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Python objects (headers, names, trees) take some hundred kilobytes.
    assert peak < total + largest + 500_000


def test_hub_id_is_downloaded(golden, monkeypatch):
    import huggingface_hub

    seen = {}

    def snapshot_download(name, *, revision, allow_patterns):
        seen.update(name=name, revision=revision, patterns=allow_patterns)
        return str(golden / "qwen2")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    loaded = load("owner/tiny-qwen2", revision="v1", tokenizer=None)
    assert loaded.source == golden / "qwen2"
    assert (seen["name"], seen["revision"]) == ("owner/tiny-qwen2", "v1")
    assert not any(pattern.endswith("bin") for pattern in seen["patterns"])


def test_failed_hub_download_names_the_id_and_the_remedy(monkeypatch):
    import huggingface_hub

    def snapshot_download(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(RuntimeError, match=r"'owner/name'.*no route.*local directory"):
        load("owner/name")


def test_default_name_is_the_bundled_model(monkeypatch, tmp_path):
    from jaxlookahead.checkpoints import bundled

    monkeypatch.setattr(bundled, "fetch", lambda: tmp_path / "bundled.gguf")
    assert find("SmolLM2-135M-Instruct") == tmp_path / "bundled.gguf"
    assert bundled.SMOLLM2.name == load_module.DEFAULT_MODEL


@pytest.mark.parametrize("source", ["nowhere.gguf", "./owner/name", "a/b/c", "", "~/nothing-here"])
def test_missing_source_names_it_and_the_choices(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if source == "":
        source = str(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"source=.*GGUF file.*hub id"):
        load(source)


def test_source_of_another_type():
    with pytest.raises(TypeError, match="source must be"):
        load(7)


@pytest.mark.parametrize("dtype", ["int8", "float99", 3.5, "float64"])
def test_unsupported_dtype_is_named(golden, dtype):
    with pytest.raises(ValueError, match=r"dtype=.*supported: float32, bfloat16"):
        load(golden / "qwen2", dtype=dtype)


def test_missing_tokenizer_names_the_remedies(golden):
    with pytest.raises(ValueError, match=r"no tokenizer.*tokenizer=None"):
        load(golden / "qwen2")


def test_single_safetensors_file_points_to_its_directory(golden):
    with pytest.raises(ValueError, match=r"pass its directory"):
        load(golden / "qwen2" / "model.safetensors")


def changed_config(golden, tmp_path, **values):
    shutil.copytree(golden / "qwen2", tmp_path / "copy")
    path = tmp_path / "copy" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return tmp_path / "copy"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mamba"}, r"copy: model_type 'mamba' is not supported; supported: gemma"),
        ({"hidden_size": 64}, r"copy: .*shape"),
        ({"num_hidden_layers": 3}, r"copy: .*lacks 12 tensors"),
        ({"num_hidden_layers": 1}, r"copy: .*model.layers.1"),
        ({"hidden_size": "wide"}, r"copy: "),
        ({"num_attention_heads": 0}, r"copy: "),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, r"copy: .*dynamic"),
    ],
)
def test_contradicting_config_gives_one_error(golden, tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        load(changed_config(golden, tmp_path, **values), tokenizer=None)


def test_an_empty_source_is_not_the_working_directory():
    with pytest.raises(FileNotFoundError, match="source='' does not exist"):
        load("")
