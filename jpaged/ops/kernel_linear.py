"""Quantized weights as the kernels for GPUs read them: the groups of `jpaged.ops.grouped`, with the
inputs of an output side by side.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jpaged.ops.grouped import GROUP, GroupedWeight
from jpaged.ops.kv_cache import is_interpreted
from jpaged.ops.linear import linear, linear_by_row
from jpaged.typing import Array, Float, Integer

ROWS_BY_ROW = 64  # rows of a tile where bits must not depend on how many rows there are


@struct.dataclass
class KernelWeight:
    """Stands for a weight `[D F]`, as `GroupedWeight` does."""

    numbers: Integer[Array, "F stored"]
    scales: Float[Array, "groups F"]
    leasts: Float[Array, "groups F"] | None

    @property
    def dtype(self) -> None:
        """Rows of any dtype are multiplied as they are."""
        return None


def for_kernels(weight: GroupedWeight) -> KernelWeight:
    """The same weight with outputs first."""
    return KernelWeight(weight.numbers.T, weight.scales, weight.leasts)


def merge(slices: KernelWeight) -> KernelWeight:
    """Weights of the same inputs, stacked along a new first axis, as one, outputs in order."""
    scales, leasts = jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1), (slices.scales, slices.leasts)
    )
    numbers = slices.numbers.reshape(-1, slices.numbers.shape[2])
    return KernelWeight(numbers, scales, leasts)


@linear.register
def _(weight: KernelWeight, x: Float[Array, "T D"], dtype: DTypeLike) -> Float[Array, "T F"]:
    return _multiply(weight, x, dtype, by_row=False)


@linear_by_row.register
def _(weight: KernelWeight, x: Float[Array, "T D"], dtype: DTypeLike) -> Float[Array, "T F"]:
    return _multiply(weight, x, dtype, by_row=True)


def _multiply(
    weight: KernelWeight, x: Float[Array, "T D"], dtype: DTypeLike, *, by_row: bool
) -> Float[Array, "T F"]:
    # Pallas takes long to import, and most who have a CPU do without.
    from pallas_kernels import gpus, quant_matmul, tiling
    from pallas_kernels.quant_weight import QuantWeight

    quantized = QuantWeight(
        numbers=weight.numbers,
        scales=weight.scales,
        leasts=weight.leasts,
        kind="int8" if weight.leasts is None else "int4",
        num_inputs=x.shape[1],
        inputs_per_scale=GROUP,
    )
    tiles = None
    if by_row:
        # One tiling for any number of rows: with it a row has the same bits beside any others.
        tiles = tiling.choose_matmul(
            None,
            M=ROWS_BY_ROW,
            D=x.shape[1],
            F=quantized.num_outputs,
            itemsize=x.dtype.itemsize,
            bits=8 if weight.leasts is None else 4,
            group=GROUP,
            gpu=gpus.current_gpu(),
        )
        tiles = dataclasses.replace(tiles, num_splits=1)
    return quant_matmul.quant_matmul(
        x, quantized, dtype=dtype, tiling=tiles, interpret=is_interpreted()
    )
