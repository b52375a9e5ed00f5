"""GGUF's blocks of Q8_0, Q4_0 and Q4_1 as weights in groups, number by number, never as floats.

A block is 32 inputs of one output: a float16 scale d, in Q4_1 a float16 least m, then the numbers.
"""

from typing import NamedTuple

import numpy as np

from jpaged.loading.stored import NumpyArray, StoredTensor, empty, slices
from jpaged.ops.grouped import GROUP, GroupedRows


class _Kind(NamedTuple):
    """What a block holds."""

    number_bytes: int
    has_least: bool = False
    zero: int = 0  # the number that stands for 0, where there is no least


_KINDS = {"Q8_0": _Kind(GROUP), "Q4_0": _Kind(GROUP // 2, zero=8), "Q4_1": _Kind(GROUP // 2, True)}


def has_groups(tensor: StoredTensor) -> bool:
    """Whether `read_groups` can read it."""
    return tensor.dtype in _KINDS and tensor.read_raw is not None and len(tensor.shape) == 2


def read_groups(tensor: StoredTensor) -> GroupedRows:
    """A whole matrix `[F D]`, its numbers and scales those of the file; NumPy arrays.

    Q4_0 gets leasts: its numbers from 0 to 15 stand for (number - 8) * d.
    """
    assert tensor.read_raw is not None
    kind, (F, D) = _KINDS[tensor.dtype], tensor.shape
    is_byte = kind.number_bytes == GROUP
    groups = D // GROUP
    numbers = empty((F, groups * kind.number_bytes), np.dtype(np.int8 if is_byte else np.uint8))
    scales = empty((F, groups), np.dtype(np.float16))
    leasts = None if is_byte else empty((F, groups), np.dtype(np.float16))
    for start, stop, place in slices(tensor, F):
        blocks = tensor.read_raw(start, stop).reshape(stop - start, groups, -1)
        scales[place] = _halves(blocks, 0)
        if leasts is not None:
            # Times a power of two: exact.
            leasts[place] = _halves(blocks, 1) if kind.has_least else scales[place] * -kind.zero
        packed = blocks[:, :, -kind.number_bytes :]
        numbers[place] = packed.reshape(stop - start, -1).view(numbers.dtype)
    # Arrays of NumPy's until they are placed on a device.
    return GroupedRows(numbers, scales, leasts)  # pyright: ignore[reportArgumentType]


def _halves(blocks: NumpyArray, i: int) -> NumpyArray:
    """The float16 number i of each block."""
    return np.ascontiguousarray(blocks[:, :, 2 * i : 2 * i + 2]).view(np.float16)[:, :, 0]
