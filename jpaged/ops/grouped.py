"""Weights of 8 or 4 bits: 32 inputs of one output are a group with a scale and perhaps a least.

`quantize` makes them; GGUF's Q8_0, Q4_0 and Q4_1 are such weights. Here they are multiplied in
plain JAX, as what they stand for in the dtype of the rows; `jpaged.ops.packed` is for C++.
"""

from typing import Literal

import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jpaged.ops.linear import linear
from jpaged.typing import Array, Float, Int

GROUP = 32
Bits = Literal["int8", "int4"]


@struct.dataclass
class GroupedWeight:
    """Stands for a weight `[D F]`, number * scale + least; zeros fill the last group of inputs."""

    numbers: Int[Array, "D F"]  # int8: -127 to 127, no leasts; uint8: 0 to 15
    scales: Float[Array, "groups F"]  # float16
    leasts: Float[Array, "groups F"] | None  # float16

    @property
    def dtype(self) -> None:
        """Rows of any dtype are multiplied as they are."""
        return None


def quantize(weight: Float[Array, "D F"], bits: Bits) -> GroupedWeight:
    """The nearest numbers, group by group. int8: the scale is the largest size / 127. int4: 15
    equal steps from the group's least to its largest, as GGUF's Q4_1."""
    D, F = weight.shape
    groups = jnp.pad(weight.astype(jnp.float32), ((0, -D % GROUP), (0, 0))).reshape(-1, GROUP, F)
    if bits == "int8":
        leasts = None
        scales = (jnp.max(jnp.abs(groups), axis=1) / 127).astype(jnp.float16)
    else:
        leasts = jnp.min(groups, axis=1).astype(jnp.float16)
        scales = ((jnp.max(groups, axis=1) - leasts.astype(jnp.float32)) / 15).astype(jnp.float16)
    wide = scales.astype(jnp.float32)[:, None]
    numbers = groups if leasts is None else groups - leasts.astype(jnp.float32)[:, None]
    numbers = jnp.round(numbers / jnp.where(wide == 0, 1, wide))
    numbers = jnp.clip(numbers, -127, 127) if leasts is None else jnp.clip(numbers, 0, 15)
    numbers = numbers.astype(jnp.int8 if leasts is None else jnp.uint8)
    return GroupedWeight(numbers.reshape(-1, F), scales, leasts)


def dequantize(weight: GroupedWeight, dtype: DTypeLike) -> Float[Array, "D F"]:
    """What it stands for, rounded once, to `dtype`."""
    groups = weight.numbers.reshape(-1, GROUP, weight.numbers.shape[1]).astype(jnp.float32)
    values = groups * weight.scales.astype(jnp.float32)[:, None]
    if weight.leasts is not None:
        values += weight.leasts.astype(jnp.float32)[:, None]
    return values.reshape(weight.numbers.shape).astype(dtype)


@linear.register
def _(weight: GroupedWeight, x: Float[Array, "T D"], dtype: DTypeLike) -> Float[Array, "T F"]:
    D = weight.numbers.shape[0]
    x = jnp.pad(x, ((0, 0), (0, D - x.shape[1])))
    return linear(dequantize(weight, x.dtype), x, dtype)
