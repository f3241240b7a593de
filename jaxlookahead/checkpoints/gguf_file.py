"""The GGUF container: metadata, and tensors read one at a time.

Written out here because the reader of the `gguf` package takes ten times as long on a vocabulary of 50,000
tokens and believes every length that the file states. The package still supplies the block formats.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_CHUNK = 1 << 20  # elements


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file.

    Attributes:
      shape: rows first, `[out, in]` for projections.
      kind: number of the block format (`gguf.GGMLQuantizationType`).
      offset: first byte, from the start of the file.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUFFile:
    """An open GGUF file. A context manager.

    Attributes:
      path: of the file.
      metadata: every key with its value; arrays of numbers are numpy arrays, arrays of strings lists.
      tensors: every tensor's shape, format and place, by name.

    Raises:
      ValueError: the file is not GGUF, is cut short, or contradicts itself.
      OSError: it can't be opened.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._file: BinaryIO = open(self.path, "rb")  # noqa: SIM115 - closed by `close`
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def read(
        self, name: str, dtype: Any = np.float32, *, order: Sequence[int] | np.ndarray | None = None
    ) -> np.ndarray:
        """Reads one tensor, dequantized; a few rows at a time, so that nothing but the result is held.

        Args:
          name: of the tensor.
          dtype: of the result.
          order: `[rows]`, where each row of the file goes; None: where it lies.
        """
        import gguf

        info = self.tensors[name]
        if order is not None and len(info.shape) == 1:
            out = np.empty(info.shape, dtype)
            out[np.asarray(order)] = self.read(name, dtype)
            return out
        kind = gguf.GGMLQuantizationType(info.kind)
        columns = info.shape[-1]
        rows = math.prod(info.shape[:-1])
        width = _row_bytes(info)
        out = np.empty((rows, columns), dtype)
        step = max(1, _CHUNK // columns)
        self._file.seek(info.offset)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            blocks = np.frombuffer(self._take(count * width), np.uint8).reshape(count, width)
            target = slice(first, first + count) if order is None else np.asarray(order[first : first + count])
            out[target] = gguf.dequantize(blocks, kind)
        return out.reshape(info.shape)

    def _read_header(self) -> None:
        if self._size < 4 or self._file.read(4) != MAGIC:
            raise ValueError(f"{self.path} is not a GGUF file: it does not begin with the bytes 'GGUF'")
        version = self._scalar("I")
        if version not in VERSIONS:
            order = " (or the file is big-endian)" if version & 0xFFFF == 0 else ""
            raise ValueError(
                f"{self.path} has GGUF version {version}{order}; supported: {', '.join(map(str, VERSIONS))}; "
                "convert the model again with a current llama.cpp"
            )
        tensors, keys = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        stated: dict[str, TensorInfo] = {}
        for _ in range(tensors):
            name = self._string()
            count = self._scalar("I")
            if not 1 <= count <= _MOST_DIMENSIONS:
                raise ValueError(f"{self.path} is damaged: the tensor {name!r} has {count} dimensions")
            dims = tuple(self._scalar("Q") for _ in range(count))
            info = TensorInfo(dims[::-1], self._scalar("I"), self._scalar("Q"))
            if name in stated:
                raise ValueError(f"{self.path} is damaged: it holds the tensor {name!r} twice")
            stated[name] = info
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{self.path} is damaged: general.alignment is {alignment!r}")
        base = -(-self._file.tell() // alignment) * alignment
        self.tensors = {n: dataclasses.replace(i, offset=base + i.offset) for n, i in stated.items()}
        self._check_tensors()

    def _check_tensors(self) -> None:
        for name, info in self.tensors.items():
            if 0 in info.shape:
                raise ValueError(f"{self.path} is damaged: the tensor {name!r} has shape {info.shape}")
            end = info.offset + _row_bytes(info, f"{self.path}: the tensor {name!r}") * math.prod(info.shape[:-1])
            if end > self._size:
                raise ValueError(
                    f"{self.path} is cut short: the tensor {name!r} ends at byte {end}, the file at "
                    f"{self._size}; "
                    "download or copy it again"
                )

    def _take(self, size: int) -> bytes:
        # The check comes first: a length that the file only claims must not be allocated.
        if size > self._size - self._file.tell():
            raise ValueError(
                f"{self.path} is cut short or damaged: it ends at byte {self._size}, {size} more bytes are "
                "stated at "
                f"byte {self._file.tell()}; download or copy it again"
            )
        return self._file.read(size)

    def _scalar(self, code: str) -> Any:
        layout = "<" + code
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _string(self) -> str:
        # Vocabularies may hold pieces that are not UTF-8.
        return self._take(self._scalar("Q")).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"{self.path} is damaged: a metadata value has the unknown type {kind}")
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{self.path}: metadata arrays of type {kind} are not supported")
        dtype = np.dtype("<" + _SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)


def _row_bytes(info: TensorInfo, what: str = "the tensor") -> int:
    """Bytes of one row, the last dimension."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(info.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ValueError(f"{what} has the block format {info.kind}, which the package gguf does not know") from None
    if info.shape[-1] % block:
        raise ValueError(f"{what} of format {kind.name} has rows of {info.shape[-1]}, no multiple of {block}")
    return info.shape[-1] // block * size


def check_formats(file: GGUFFile) -> None:
    """Refuses block formats that can't be dequantized, before anything is read.

    Raises:
      ValueError: a tensor's format is not supported, named.
    """
    import gguf

    for number in sorted({info.kind for info in file.tensors.values()}):
        kind = gguf.GGMLQuantizationType(number)
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            name = next(n for n, info in file.tensors.items() if info.kind == number)
            raise ValueError(
                f"{file.path}: the block format {kind.name} of the tensor {name!r} can't be dequantized; "
                "use a file "
                "quantized as F32, F16, BF16, Q8_0 or one of the K formats"
            ) from None
