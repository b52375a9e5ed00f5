"""Safetensors files, and the index that spreads a checkpoint over several of them.

Promise: everything that the index and the headers can tell about a damaged checkpoint is found
before a single weight is read, and the error names the file and the tensor.
"""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jpaged.errors import CheckpointError
from jpaged.loading.stored import NumpyArray, StoredTensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
_MAX_HEADER = 100_000_000  # bytes; the format's own limit


def open_shards(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of `model.safetensors`, or of all the shards that its index names.

    Raises:
        CheckpointError: a shard or a tensor of the index is missing, or a file is damaged.
    """
    if not (folder / INDEX).is_file():
        return open_file(folder / WEIGHTS)
    weight_map = _read_index(folder / INDEX)
    shards = sorted(set(weight_map.values()))
    if absent := [shard for shard in shards if not (folder / shard).is_file()]:
        raise CheckpointError(
            f"{folder} lacks {len(absent)} of the {len(shards)} shards that {INDEX} names: "
            f"{', '.join(absent)}; fetch them again"
        )
    headers = {shard: open_file(folder / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise CheckpointError(
                f"{folder / shard} has no tensor {name!r}, though {INDEX} places it there; "
                "fetch the file again"
            )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _read_index(path: Path) -> dict[str, str]:
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map, which says where each tensor lies")
    return weight_map


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that must hold one object; a CheckpointError says where it does not parse."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}; fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def open_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, by name; reads its header only.

    Raises:
        CheckpointError: the file is none, or is shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= header_len <= _MAX_HEADER:
            raise CheckpointError(f"{path} is no safetensors file: its first bytes give no header")
        if size < 8 + header_len:
            raise CheckpointError(_truncated(path, size, 8 + header_len))
        header = _parse_header(path, file.read(header_len))
    data_start = 8 + header_len
    try:
        end = data_start + max((info["data_offsets"][1] for info in header.values()), default=0)
        tensors = {name: _stored(path, name, info, data_start) for name, info in header.items()}
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{path} has a damaged header ({error!r}); fetch it again") from error
    if size < end:
        raise CheckpointError(_truncated(path, size, end))
    return tensors


def _truncated(path: Path, size: int, expected: int) -> str:
    return f"{path} is truncated: {size} bytes of at least {expected}; fetch it again"


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is no safetensors file, or its header is damaged: {error}"
        ) from error
    return header


def _stored(path: Path, name: str, info: dict[str, Any], data_start: int) -> StoredTensor:
    begin, end = info["data_offsets"]
    shape = tuple(info["shape"])
    dtype = _DTYPES.get(info["dtype"])
    if dtype is None:
        read_rows = partial(_refuse, path, name, info["dtype"])
    else:
        row_len = math.prod(shape[1:])
        if end - begin != math.prod(shape) * np.dtype(dtype).itemsize:
            raise CheckpointError(
                f"{path}: tensor {name!r} of shape {list(shape)} and type {info['dtype']} does not "
                f"fill its {end - begin} bytes; fetch the file again"
            )
        read_rows = partial(_read_rows, path, data_start + begin, np.dtype(dtype), row_len, shape)
    return StoredTensor(name, shape, info["dtype"], read_rows)


def _read_rows(
    path: Path,
    offset: int,
    dtype: np.dtype[Any],
    row_len: int,
    shape: tuple[int, ...],
    start: int,
    stop: int,
) -> NumpyArray:
    # Not a memory map: its pages would count as this process's memory, and the result would change
    # with the file.
    offset += start * row_len * dtype.itemsize
    values = np.fromfile(path, dtype, (stop - start) * row_len, offset=offset)
    return values.reshape((stop - start, *shape[1:]))


def _refuse(path: Path, name: str, dtype: str, start: int, stop: int) -> NumpyArray:
    del start, stop
    raise CheckpointError(
        f"{path}: tensor {name!r} has type {dtype}; jpaged reads {', '.join(_DTYPES)} "
        "from unquantized checkpoints"
    )
