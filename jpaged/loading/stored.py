"""A tensor that still lies in a file, and how it becomes an array.

Both file formats describe their tensors as `StoredTensor`; nothing here knows which one it was.
Reading goes in slices of a few megabytes straight into the result, so that a load never holds much
more than what it returns.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jpaged.errors import CheckpointError

NumpyArray = np.ndarray[Any, np.dtype[Any]]
_SLICE = 1 << 21  # values converted at once
_ALIGNMENT = 64  # bytes; on a CPU `jax.device_put` adopts an array aligned so, and copies any other


class StoredTensor(NamedTuple):
    """A tensor in a file, not read yet."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as the file names it
    read_rows: Callable[[int, int], NumpyArray]  # first-axis rows [start, stop), a float type
    row_order: NumpyArray | None = None  # stored row r is row row_order[r] of the result
    offset: float = 0.0  # added to every value, before it is rounded to the result's dtype
    read_raw: Callable[[int, int], NumpyArray] | None = None  # u8[rows, bytes of one], as stored


def read_tensor(tensor: StoredTensor, dtype: str) -> NumpyArray:
    """Reads a whole tensor as `dtype` (float32, bfloat16 or float16), rounding to nearest.

    Raises:
        CheckpointError: a finite value is too large for float16.
    """
    out = empty(tensor.shape, jnp.dtype(dtype))
    # A scalar is one row, and the rows of a tensor with a zero dimension are none.
    rows = out.reshape((-1, *tensor.shape[1:])) if out.size else out[:0]
    for start, stop, place in slices(tensor, len(rows)):
        rows[place] = _convert(tensor, tensor.read_rows(start, stop), out.dtype)
    return out


def slices(tensor: StoredTensor, num_rows: int) -> Iterator[tuple[int, int, Any]]:
    """Ranges of stored rows, a few megabytes each, and where these rows go in the result."""
    step, order = max(1, _SLICE // max(1, math.prod(tensor.shape[1:]))), tensor.row_order
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        yield start, stop, slice(start, stop) if order is None else order[start:stop]


def _convert(tensor: StoredTensor, values: NumpyArray, dtype: np.dtype[Any]) -> NumpyArray:
    if tensor.offset:
        values = values.astype(np.float32) + np.float32(tensor.offset)
    if dtype != np.float16 or values.dtype == np.float16:
        return values.astype(dtype, copy=False)
    try:
        with np.errstate(over="raise"):
            return values.astype(np.float32, copy=False).astype(dtype)
    except FloatingPointError:
        raise CheckpointError(
            f"tensor {tensor.name!r} has values up to {np.abs(values).max():g}, beyond float16's "
            "65504; load the model with dtype bfloat16 or float32"
        ) from None


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NumpyArray:
    """An array for JAX to adopt."""
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)
