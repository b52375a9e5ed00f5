"""Weights of 8 or 4 bits: 32 inputs of one output are a group with a scale and perhaps a least.

`quantize` makes them; GGUF's Q8_0, Q4_0 and Q4_1 are such weights. Here they are multiplied in
plain JAX, as what they stand for in the dtype of the rows; `jpaged.ops.packed` is for C++.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jpaged.ops.linear import linear, linear_by_row
from jpaged.typing import Array, Float, Integer

GROUP = 32
Bits = Literal["int8", "int4"]


@struct.dataclass
class GroupedWeight:
    """Stands for a weight `[D F]`, number * scale + least; zeros fill the last group of inputs.

    4-bit numbers lie two in a byte: a group's input d in the low half of byte d, its input d + 16
    in the high half, as in GGUF.
    """

    numbers: Integer[
        Array, "stored F"
    ]  # int8 [D F], -128 to 127, no leasts; uint8 [D/2 F], 0 to 15
    scales: Float[Array, "groups F"]  # float16
    leasts: Float[Array, "groups F"] | None  # float16

    @property
    def dtype(self) -> None:
        """Rows of any dtype are multiplied as they are."""
        return None


@struct.dataclass
class GroupedRows:
    """The same with outputs first, `[F D]`, as checkpoints have their weights."""

    numbers: Integer[Array, "F stored"]
    scales: Float[Array, "F groups"]
    leasts: Float[Array, "F groups"] | None


def quantize(weight: Float[Array, "D F"], bits: Bits) -> GroupedWeight:
    """The nearest numbers, group by group. int8: the scale is the largest size / 127. int4: 15
    equal steps from the group's least to its largest, as GGUF's Q4_1."""
    D, F = weight.shape
    groups = jnp.pad(weight.astype(jnp.float32), ((0, -D % GROUP), (0, 0))).reshape(-1, GROUP, F)
    if bits == "int8":
        scales = (jnp.max(jnp.abs(groups), axis=1) / 127).astype(jnp.float16)
        numbers = jnp.clip(_steps(groups, scales), -127, 127).astype(jnp.int8)
        return GroupedWeight(numbers.reshape(-1, F), scales, None)
    leasts = jnp.min(groups, axis=1).astype(jnp.float16)
    wide = leasts.astype(jnp.float32)
    scales = ((jnp.max(groups, axis=1) - wide) / 15).astype(jnp.float16)
    numbers = jnp.clip(_steps(groups - wide[:, None], scales), 0, 15).astype(jnp.uint8)
    both = numbers[:, : GROUP // 2] | (numbers[:, GROUP // 2 :] << 4)
    return GroupedWeight(both.reshape(-1, F), scales, leasts)


def _steps(
    groups: Float[Array, "groups 32 F"], scales: Float[Array, "groups F"]
) -> Float[Array, "groups 32 F"]:
    wide = scales.astype(jnp.float32)[:, None]
    return jnp.round(groups / jnp.where(wide == 0, 1, wide))


def numbers_by_group(weight: GroupedWeight) -> Integer[Array, "groups 32 F"]:
    """A byte for each number: int8, or uint8 where there are leasts."""
    F = weight.numbers.shape[1]
    if weight.leasts is None:
        return weight.numbers.reshape(-1, GROUP, F)
    both = weight.numbers.reshape(-1, GROUP // 2, F)
    return jnp.concatenate([both & 15, both >> 4], axis=1)


def dequantize(weight: GroupedWeight, dtype: DTypeLike) -> Float[Array, "D F"]:
    """What it stands for, rounded once, to `dtype`."""
    values = numbers_by_group(weight).astype(jnp.float32)
    values *= weight.scales.astype(jnp.float32)[:, None]
    if weight.leasts is not None:
        values += weight.leasts.astype(jnp.float32)[:, None]
    return values.reshape(-1, values.shape[2]).astype(dtype)


def grouped_bytes(D: int, F: int, bits: Bits) -> int:
    """Bytes of a weight `[D F]` once quantized."""
    group_bytes = GROUP + 2 if bits == "int8" else GROUP // 2 + 4
    return -(-D // GROUP) * F * group_bytes


def transpose(rows: GroupedRows) -> GroupedWeight:
    """The same weight with inputs first."""
    leasts = None if rows.leasts is None else rows.leasts.T
    return GroupedWeight(rows.numbers.T, rows.scales.T, leasts)


def join(parts: Sequence[GroupedRows]) -> GroupedRows | None:
    """Weights of the same inputs as one, their outputs in order; None if not all are of one kind,
    with leasts or without."""
    if len({part.leasts is None for part in parts}) > 1:
        return None
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)


def merge(slices: GroupedWeight) -> GroupedWeight:
    """Weights of the same inputs, stacked along a new first axis, as one, outputs in order."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1), slices)


@linear.register
def _(weight: GroupedWeight, x: Float[Array, "T D"], dtype: DTypeLike) -> Float[Array, "T F"]:
    values = dequantize(weight, x.dtype)
    return linear(values, _pad_inputs(x, values.shape[0]), dtype)


@linear_by_row.register
def _(weight: GroupedWeight, x: Float[Array, "T D"], dtype: DTypeLike) -> Float[Array, "T F"]:
    values = dequantize(weight, x.dtype)
    return linear_by_row(values, _pad_inputs(x, values.shape[0]), dtype)


def _pad_inputs(x: Float[Array, "T D"], num_inputs: int) -> Float[Array, "T padded_D"]:
    return jnp.pad(x, ((0, 0), (0, num_inputs - x.shape[1])))
