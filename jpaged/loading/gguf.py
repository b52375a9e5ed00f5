"""The GGUF file format: metadata, and tensors dequantized row by row.

Knows the container and nothing of models or tokenizers. The header is parsed here, since the `gguf`
package's reader takes many seconds for a large vocabulary; the package gives the block formats.
"""

import math
import mmap
import re
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from jpaged.errors import CheckpointError
from jpaged.loading.stored import NumpyArray, StoredTensor

MAGIC = b"GGUF"
Metadata = dict[str, Any]

_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # type id -> struct letter
_STRING, _ARRAY = 8, 9
_TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GGUFFile(NamedTuple):
    """A model in one file or several: `tensors` by llama.cpp's names, rows in the file's order."""

    path: Path
    metadata: Metadata
    tensors: dict[str, StoredTensor]


def open_gguf(path: Path) -> GGUFFile:
    """Opens a GGUF file; any part of a split model opens the whole. Reads no weights.

    Raises:
        CheckpointError: the file is none, is damaged or truncated, a part of it is missing, a
            tensor's type is not supported, or the `gguf` package is not installed.
    """
    parts = [_open_part(part) for part in _parts(path)]
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    return GGUFFile(path, parts[0].metadata, tensors)


def first_part(path: Path) -> bool:
    """Whether a file opens a model: no part of a split one, or the first."""
    match = _PART.fullmatch(path.name)
    return match is None or int(match[2]) == 1


def _parts(path: Path) -> list[Path]:
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    parts = [path.with_name(f"{match[1]}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    if absent := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(
            f"{path} is one of {count} parts, and {', '.join(absent)} is not beside it; "
            "put all parts into one directory"
        )
    return parts


def _open_part(path: Path) -> GGUFFile:
    if path.stat().st_size < len(MAGIC):
        raise CheckpointError(f"{path} is no GGUF file: it has {path.stat().st_size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != MAGIC:
            raise CheckpointError(f"{path} is no GGUF file: it begins with {data[:4]!r}")
        try:
            return _parse(path, _Cursor(data))
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path} is truncated or damaged inside its header ({len(data)} bytes); "
                "fetch it again"
            ) from error


class _Cursor:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap):
        self.data, self.offset = data, len(MAGIC)

    def scalar(self, letter: str) -> Any:
        value = struct.unpack_from("<" + letter, self.data, self.offset)[0]
        self.offset += struct.calcsize(letter)
        return value

    def raw(self, num_bytes: int) -> bytes:
        self.offset += num_bytes
        if self.offset > len(self.data):
            raise struct.error("past the end of the file")
        return self.data[self.offset - num_bytes : self.offset]

    def string(self) -> str:
        return self.raw(self.scalar("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, count = self.scalar("I"), self.scalar("Q")
            if kind in _SCALARS:
                dtype = np.dtype("<" + _SCALARS[kind])
                return np.frombuffer(self.raw(count * dtype.itemsize), dtype).tolist()
            return [self.value(kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise struct.error(f"unknown value type {kind}")
        # The shortest decimal that a float32 stands for: 1e-05, not 9.999999747378752e-06.
        value = self.scalar(_SCALARS[kind])
        return float(str(np.float32(value))) if _SCALARS[kind] == "f" else value


def _parse(path: Path, cursor: _Cursor) -> GGUFFile:
    if (version := cursor.scalar("I")) not in (2, 3):
        raise CheckpointError(
            f"{path} has GGUF version {version}; jpaged reads little-endian files of version 2 or 3"
        )
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_keys)}
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    data_start = -(-cursor.offset // alignment) * alignment
    quants = _gguf_package(path)
    tensors = {info.name: _stored(path, info, data_start, quants) for info in infos}
    if metadata.get("split.count", 0) > 1 and _PART.fullmatch(path.name) is None:
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} parts, but its name does not end in "
            "-00001-of-0000N.gguf, by which the others are found; rename it"
        )
    return GGUFFile(path, metadata, tensors)


class _TensorInfo(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


def _tensor_info(cursor: _Cursor) -> _TensorInfo:
    name = cursor.string()
    dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
    return _TensorInfo(name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q"))


def _gguf_package(path: Path) -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a GGUF file, and reading it needs the gguf package: "
            'pip install "jpaged[gguf]"'
        ) from error
    return gguf


def _stored(path: Path, info: _TensorInfo, data_start: int, package: ModuleType) -> StoredTensor:
    try:
        kind = package.GGMLQuantizationType(info.type_id)
    except ValueError:
        kind = None
    if kind is None or kind.name not in _TYPES:
        raise CheckpointError(
            f"{path}: tensor {info.name!r} has the type {kind.name if kind else info.type_id}, "
            f"which is not supported; supported are {', '.join(_TYPES)}"
        )
    block_len, block_bytes = package.GGML_QUANT_SIZES[kind]
    row_len = math.prod(info.shape[1:])
    if row_len % block_len:
        raise CheckpointError(
            f"{path}: rows of tensor {info.name!r} have {row_len} values, no multiple of the "
            f"{block_len} that {kind.name} packs together; the file is damaged"
        )
    row_bytes = row_len // block_len * block_bytes
    start = data_start + info.offset
    end, size = start + info.shape[0] * row_bytes, path.stat().st_size
    if size < end:
        raise CheckpointError(
            f"{path} is truncated: {size} bytes, but tensor {info.name!r} ends at byte {end}; "
            "fetch it again"
        )
    read_raw = partial(_read_raw, path, start, row_bytes)
    dequantize = partial(package.quants.dequantize, qtype=kind)
    read_rows = partial(_read_rows, read_raw, info.shape, dequantize)
    return StoredTensor(info.name, info.shape, kind.name, read_rows, read_raw=read_raw)


def _read_raw(path: Path, offset: int, row_bytes: int, start: int, stop: int) -> NumpyArray:
    num_rows = stop - start
    raw = np.fromfile(path, np.uint8, num_rows * row_bytes, offset=offset + start * row_bytes)
    return raw.reshape(num_rows, row_bytes)


def _read_rows(
    read_raw: Callable[[int, int], NumpyArray],
    shape: tuple[int, ...],
    dequantize: Callable[[NumpyArray], NumpyArray],
    start: int,
    stop: int,
) -> NumpyArray:
    return dequantize(read_raw(start, stop)).reshape(stop - start, *shape[1:])
