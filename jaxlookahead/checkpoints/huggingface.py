"""Hugging Face directories: configuration and safetensors, single or sharded, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def hf_config(path: Path) -> dict[str, Any]:
    """Reads `config.json`.

    Raises:
      ValueError: it is missing or damaged.
    """
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"; pass the GGUF file itself: {ggufs[0]}" if ggufs else ""
        raise ValueError(f"{path} is not a Hugging Face checkpoint: it holds no config.json{hint}")
    return _read_json(path / "config.json")


def generation_config(path: Path) -> dict[str, Any] | None:
    """Reads `generation_config.json`, where there is one."""
    found = path / "generation_config.json"
    return _read_json(found) if found.is_file() else None


def shards(path: Path) -> dict[Path, list[str]]:
    """Which files hold which tensors.

    Raises:
      ValueError: there are no safetensors files, one is missing or damaged, or the index contradicts them.
    """
    if (path / SINGLE).is_file():
        return {path / SINGLE: _names(path / SINGLE)}
    if not (path / INDEX).is_file():
        raise ValueError(_no_weights(path))
    wanted: dict[Path, list[str]] = {}
    weight_map = _read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path / INDEX} is damaged: it has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{path / INDEX} is damaged: it places {name!r} in {file!r}, which is not a file's name")
        wanted.setdefault(path / file, []).append(name)
    absent = sorted(file.name for file in wanted if not file.is_file())
    if absent:
        raise ValueError(f"{path} lacks {', '.join(absent)}, which {INDEX} names; download the checkpoint again")
    for file, names in wanted.items():
        lacking = sorted(set(names) - set(_names(file)))
        if lacking:
            raise ValueError(f"{file} lacks {', '.join(lacking)}, which {INDEX} places there; download it again")
    return wanted


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields name and values of every tensor, in the checkpoint's dtype (bfloat16 included), one at a time.

    Raises:
      ValueError: as `shards`, or a tensor is not of a float type, before the first is read.
    """
    found = shards(path)
    for file, names in found.items():
        with _open(file) as opened:
            for name in names:
                kind = opened.get_slice(name).get_dtype()
                if kind not in _FLOATS:
                    raise ValueError(
                        f"{file}: the tensor {name!r} has dtype {kind}, which is not supported; supported: "
                        f"{', '.join(_FLOATS)}; use an unquantized checkpoint"
                    )
    for file, names in found.items():
        with _open(file) as opened:
            for name in names:
                yield name, opened.get_tensor(name)


def _names(file: Path) -> list[str]:
    with _open(file) as opened:
        return list(opened.keys())


def _open(file: Path) -> Any:
    import ml_dtypes  # noqa: F401 - gives numpy the dtype bfloat16, which safetensors looks up by name
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}); download or copy it again") from error


def _no_weights(path: Path) -> str:
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        return (
            f"{path} holds its weights as pickles only ({', '.join(pickles[:3])}), which can run code when "
            "they are "
            "read; convert them with the model's save_pretrained(..., safe_serialization=True)"
        )
    others = sorted(file.name for file in path.glob("*.safetensors"))
    found = f"; it holds {', '.join(others[:3])}" if others else ""
    return f"{path} holds no weights: neither {SINGLE} nor {INDEX}{found}"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: it is not JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged: it holds {type(content).__name__}, not an object")
    return content
