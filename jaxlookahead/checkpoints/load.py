"""`load`: a checkpoint of any supported kind into a model, its parameters and its tokenizer."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlookahead.models.protocol import Model, Params

DEFAULT_MODEL = "smollm2-135m-instruct"

Placement = jax.sharding.Sharding | Callable[[tuple[str, ...], tuple[int, ...]], jax.sharding.Sharding] | None

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What `load` returns. Unpacks as `model, params, tokenizer`.

    Attributes:
      model: of the `Model` contract.
      params: its parameters, a pytree of arrays.
      tokenizer: a tokenizer of `transformers`, or None.
      eos_ids: ids of the tokens that end a response, ascending; empty where the checkpoint names none.
      config: the checkpoint's configuration, in the form of `config.json`.
      source: the file or directory that was read.
    """

    model: Model
    params: Params = dataclasses.field(repr=False)
    tokenizer: Any = dataclasses.field(repr=False)
    eos_ids: tuple[int, ...]
    config: Mapping[str, Any] = dataclasses.field(repr=False)
    source: Path

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.params, self.tokenizer))


def load(
    source: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    dtype: Any = None,
    sharding: Placement = None,
    tokenizer: Any = "auto",
    revision: str | None = None,
) -> Loaded:
    """Reads a checkpoint of one of `models.families.FAMILIES`, or of T5, tensor by tensor.

    Beyond the parameters themselves the host holds one tensor at a time. A T5 comes as a `T5Model` and its weights, for
    `jaxlookahead.encoder_decoder.generate`.

    Args:
      source: a GGUF file, a Hugging Face directory (safetensors, config, tokenizer), a hub id (`owner/name`),
        or `smollm2-135m-instruct`, which is downloaded once (98 MB).
      dtype: of parameters and cache; None: float32 on CPU, bfloat16 elsewhere.
      sharding: where parameters go: None (the default device), one sharding for all, or a function of a
        parameter's path (names from the root) and shape.
      tokenizer: `auto`: the checkpoint's own; a directory, GGUF file or hub id to take it from; a tokenizer
        object; or None to work with token ids alone.
      revision: branch, tag or commit; for hub ids.

    Raises:
      FileNotFoundError: `source` is neither a path nor a hub id.
      ValueError: the checkpoint is damaged or of a kind that is not supported.
      RuntimeError: a download failed.
    """
    dtype = _dtype(dtype, sharding)
    path = find(source, revision=revision)
    return (_load_directory if path.is_dir() else _load_gguf)(path, dtype, sharding, tokenizer)


def find(source: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The file or directory of `source`, downloaded where needed; arguments and errors as for `load`."""
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"source must be a path, a hub id or {DEFAULT_MODEL!r}, got {type(source).__name__}")
    text = os.fspath(source)
    if isinstance(source, str) and text.lower() == DEFAULT_MODEL:
        from jaxlookahead.checkpoints.bundled import fetch

        return fetch()
    path = Path(text).expanduser()
    if text and path.exists():
        return path
    if isinstance(source, str) and _HUB_ID.fullmatch(text):
        return _download(text, revision)
    raise FileNotFoundError(
        f"source={text!r} does not exist; pass a GGUF file, a Hugging Face directory, a hub id "
        "(owner/name) or "
        f"{DEFAULT_MODEL!r}"
    )


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # The library raises its own, its HTTP client's and OSErrors.
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RuntimeError(
            f"source={name!r} is no local path and could not be downloaded from the hub ({first}); check "
            "the name, the "
            "revision, the network and, for gated models, that you are logged in; or pass a local directory"
        ) from error


def _load_directory(path: Path, dtype: Any, sharding: Placement, tokenizer: Any) -> Loaded:
    from jaxlookahead.checkpoints import huggingface
    from jaxlookahead.checkpoints.tokenizer import eos_ids

    config = huggingface.hf_config(path)
    if config.get("model_type") == "t5":
        huggingface.shards(path)
        found = _tokenizer(path, tokenizer)
        model, params = _build_t5(path, config, dtype, sharding)
    else:
        builder = _builder(path, config, dtype, sharding)
        huggingface.shards(path)
        found = _tokenizer(path, tokenizer)
        model, params = _build(path, builder, huggingface.tensors(path))
    ends = eos_ids(found, huggingface.generation_config(path), config)
    return Loaded(model, params, found, ends, config, path)


def _load_gguf(path: Path, dtype: Any, sharding: Placement, tokenizer: Any) -> Loaded:
    from jaxlookahead.checkpoints import gguf
    from jaxlookahead.checkpoints.gguf_file import GGUFFile
    from jaxlookahead.checkpoints.gguf_tokenizer import eos_token_ids
    from jaxlookahead.checkpoints.tokenizer import eos_ids

    if path.suffix == ".safetensors":
        raise ValueError(f"source={str(path)!r} is one file of a checkpoint; pass its directory, {path.parent}")
    with GGUFFile(path) as file:
        config = gguf.hf_config(file)
        builder = _builder(path, config, dtype, sharding)
        found = _tokenizer(path, tokenizer, file.metadata)
        model, params = _build(path, builder, gguf.tensors(file, config, dtype))
        ends = eos_ids(found, {"eos_token_id": eos_token_ids(file.metadata)})
    return Loaded(model, params, found, ends, config, path)


def _builder(path: Path, config: Mapping[str, Any], dtype: Any, sharding: Placement) -> Any:
    from jaxlookahead.models.config import DecoderConfig
    from jaxlookahead.models.weights import ParamsBuilder

    try:
        return ParamsBuilder(DecoderConfig.from_hf(config), dtype, sharding)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path}: the configuration holds a value of a wrong kind ({error!r})") from error


def _build_t5(path: Path, config: Mapping[str, Any], dtype: Any, sharding: Placement) -> tuple[Model, Params]:
    from jaxlookahead.checkpoints import huggingface, t5

    try:
        model, params = t5.build(config, huggingface.tensors(path), dtype)
    except KeyError as error:
        raise ValueError(f"{path}: the configuration of model_type 't5' lacks {error}") from error
    except ValueError as error:
        raise error if str(path) in str(error) else ValueError(f"{path}: {error}") from error
    if not callable(sharding):
        return model, params if sharding is None else jax.device_put(params, sharding)

    def place(keys: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return jax.device_put(leaf, sharding(tuple(key.key for key in keys), leaf.shape))

    return model, jax.tree_util.tree_map_with_path(place, params)


def _build(path: Path, builder: Any, tensors: Iterable[tuple[str, np.ndarray]]) -> tuple[Model, Params]:
    try:
        for name, array in tensors:
            builder.add(name, array)
            # The loop variable would hold this tensor while the next is read.
            del array
        return builder.finish()
    except ValueError as error:
        raise error if str(path) in str(error) else ValueError(f"{path}: {error}") from error


def _tokenizer(path: Path, wanted: Any, metadata: Mapping[str, Any] | None = None) -> Any:
    from jaxlookahead.checkpoints.tokenizer import from_directory, from_gguf

    if wanted is None or not isinstance(wanted, (str, os.PathLike)):
        return wanted
    if wanted != "auto":
        path, metadata = find(wanted), None
    if path.is_dir():
        return from_directory(path)
    if metadata is None:
        from jaxlookahead.checkpoints.gguf_file import GGUFFile

        with GGUFFile(path) as file:
            metadata = file.metadata
    return from_gguf(path, metadata)


def _dtype(dtype: Any, sharding: Placement) -> np.dtype:
    if dtype is None:
        devices = getattr(sharding, "device_set", None)
        platform = next(iter(devices)).platform if devices else jax.default_backend()
        return jax.numpy.dtype("float32" if platform == "cpu" else "bfloat16")
    try:
        chosen = jax.numpy.dtype(dtype)
    except TypeError:
        chosen = None
    if chosen is None or chosen.name not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} is not supported; supported: {', '.join(_DTYPES)}, or None to choose")
    return chosen
