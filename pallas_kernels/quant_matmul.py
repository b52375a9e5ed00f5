"""Products of floating rows with weights of 8 or 4 bits, which stay so in memory.

Owns the kernel. Numbers become floats of the rows' dtype, which holds each of them exactly, and
are multiplied on tensor cores (float32 rows: in full precision, without them). The sum over inputs
with one scale is scaled in float32, so that a result differs from the exact one by the rounding of
float32 sums alone.

A program owns a tile of rows and outputs and walks over the inputs, or over one of `num_splits`
shares of them; XLA adds what the shares gave.
"""

import dataclasses
import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import float8, quant_weight
from pallas_kernels.gpus import current_gpu
from pallas_kernels.quant_weight import HALF, INT4_MIDDLE, RUN, QuantWeight
from pallas_kernels.tiling import MatmulTiling, choose_matmul, power_of_two

X_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

# A power of two so large that the last bits of its mantissa are worth 1, 2, 4 and 8, and its bits.
_ANCHORS = {
    "bfloat16": (2.0**7, 0x4300),
    "float16": (2.0**10, 0x6400),
    "float32": (2.0**23, 0x4B000000),
}


def quant_matmul(
    x: jax.Array,
    weight: QuantWeight,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    tiling: MatmulTiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x [M D] times the weight [D F], accumulated in float32 and rounded once: [M F].

    Args:
        x: bfloat16, float16 or float32.
        weight: see `QuantWeight`.
        dtype: of the result; None: that of x.
        tiling: None chooses by shape and device. With one tiling a row has the same bits beside
            any others.
        interpret: runs on a CPU, slowly.

    Raises:
        ValueError: shapes or types that do not go together, or a tiling that does not fit them.
    """
    quant_weight.check(weight)
    if x.ndim != 2 or x.shape[1] != weight.num_inputs or x.dtype not in X_DTYPES:
        raise ValueError(
            f"x is {x.dtype} {x.shape}; it must be bfloat16, float16 or float32, of shape "
            f"[M {weight.num_inputs}] as the weight has so many inputs"
        )
    out_dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    if x.shape[0] == 0:
        return jnp.zeros((0, weight.num_outputs), out_dtype)
    M, D = x.shape
    tiling = choose_matmul(
        tiling,
        M=M,
        D=D,
        F=weight.num_outputs,
        itemsize=x.dtype.itemsize,
        bits=4 if weight.kind == "int4" else 8,
        group=weight.inputs_per_scale,
        gpu=current_gpu(),
    )
    product = _describe(x, weight, tiling)
    if weight.order is not None:
        x = x[:, weight.order]
    return _launch(x, weight, product, out_dtype, interpret=interpret)


# --- around the kernel ---


@dataclasses.dataclass(frozen=True)
class _Product:
    """What the kernel knows when it is compiled."""

    M: int
    D: int
    F: int
    stored_inputs: int
    num_scale_rows: int
    kind: str
    inputs_per_scale: int
    outputs_per_scale: int
    offset: str | None  # "zero", "least"
    tiling: MatmulTiling

    @property
    def depth(self) -> int:
        """Inputs with one scale that are multiplied at once."""
        return min(self.tiling.tile_d, largest_power(self.inputs_per_scale))

    @property
    def num_steps(self) -> int:
        return pl.cdiv(self.D, self.tiling.tile_d)

    @property
    def is_scaled_at_the_end(self) -> bool:
        return self.num_scale_rows == 1 and self.offset != "least"


def largest_power(n: int) -> int:
    """The largest power of two that divides n."""
    return n & -n


def _describe(x: jax.Array, weight: QuantWeight, tiling: MatmulTiling) -> _Product:
    M, D = x.shape
    inputs_per_scale = weight.inputs_per_scale
    if weight.scales.shape[0] == 1:  # then for any number of inputs
        inputs_per_scale = power_of_two(D, at_least=tiling.tile_d)
    offset = None if weight.zeros is None else "zero"
    if weight.leasts is not None:
        offset = "least"
    product = _Product(
        M=M,
        D=D,
        F=weight.num_outputs,
        stored_inputs=weight.stored_inputs,
        num_scale_rows=weight.scales.shape[0],
        kind=weight.kind,
        inputs_per_scale=inputs_per_scale,
        outputs_per_scale=weight.outputs_per_scale,
        offset=offset,
        tiling=tiling,
    )
    least_depth = RUN if weight.kind == "int4" else RUN // 2
    if product.depth < least_depth:
        raise ValueError(
            f"the kernel multiplies {least_depth} inputs of {weight.kind} numbers at once, but "
            f"scales are shared by {weight.inputs_per_scale} and {tiling.tile_d=}; repack the "
            f"weight with a multiple of {least_depth} inputs per scale, or take larger tiles"
        )
    return product


def _sum_stretches(x: jax.Array, product: _Product) -> jax.Array:
    """f32[stretches M]: the sums of stretches of `depth` inputs, halves added to halves.

    As many as the steps reach, zeros where the inputs end before. Of a reduction XLA chooses
    the order, by the number of rows too; these additions have the same bits beside any rows.
    """
    missing = product.num_steps * product.tiling.tile_d - product.D
    sums = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, missing)))
    sums = sums.reshape(product.M, -1, product.depth)
    while (width := sums.shape[2]) > 1:
        sums = sums[..., : width // 2] + sums[..., width // 2 :]
    return sums[..., 0].T


def _launch(
    x: jax.Array, weight: QuantWeight, product: _Product, dtype: jnp.dtype, *, interpret: bool
) -> jax.Array:
    M, F, tiling = product.M, product.F, product.tiling
    splits = tiling.num_splits
    operands = [x, weight.numbers, weight.scales]
    if weight.zeros is not None:
        operands += [weight.zeros]
    if weight.leasts is not None:
        operands += [weight.leasts, _sum_stretches(x, product)]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        ft.partial(_kernel, product=product),
        # Programs that share a tile of the weight run side by side and find it in the cache.
        grid=(pl.cdiv(M, tiling.tile_m), pl.cdiv(F, tiling.tile_f), splits),
        in_specs=[whole] * len(operands),
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((splits, M, F), dtype if splits == 1 else jnp.float32),
        compiler_params=pltriton.CompilerParams(
            num_warps=tiling.num_warps, num_stages=tiling.num_stages
        ),
        interpret=interpret,
        name=f"quant_matmul_{product.kind}",
    )(*operands)
    return out[0] if splits == 1 else jnp.sum(out, axis=0).astype(dtype)


# --- inside ---


def _kernel(*refs: Any, product: _Product) -> None:
    *in_refs, out_ref = refs  # as `_launch` has them; [splits M F]
    M, F, tiling = product.M, product.F, product.tiling
    split = pl.program_id(2)
    rows = pl.program_id(0) * tiling.tile_m + lax.iota(jnp.int32, tiling.tile_m)
    outputs = pl.program_id(1) * tiling.tile_f + lax.iota(jnp.int32, tiling.tile_f)
    tile = _Tile(tuple(in_refs), rows, outputs, product)

    def step(i: jax.Array, acc: jax.Array) -> jax.Array:
        for first in range(0, tiling.tile_d, product.depth):
            acc = _add_stretch(acc, tile, i * tiling.tile_d + first)
        return acc

    first, last = jnp.int32(0), jnp.int32(product.num_steps)
    if tiling.num_splits > 1:
        steps_each = pl.cdiv(product.num_steps, tiling.num_splits)
        first = split * steps_each
        last = jnp.minimum(first + steps_each, last)
    acc = lax.fori_loop(first, last, step, jnp.zeros((tiling.tile_m, tiling.tile_f), jnp.float32))
    if product.is_scaled_at_the_end:
        acc *= tile.load_scales(jnp.int32(0))
    pltriton.store(
        out_ref.at[split, rows[:, None], outputs[None, :]],
        acc.astype(out_ref.dtype),
        mask=(rows < M)[:, None] & (outputs < F)[None, :],
    )


def _add_stretch(acc: jax.Array, tile: "_Tile", first: jax.Array) -> jax.Array:
    """acc plus the products of `depth` inputs from `first` on, which share scales."""
    product = tile.product
    scale_row = lax.div(first, jnp.int32(product.inputs_per_scale))
    # What lies behind the last input has no scale of its own. It is 0 with any.
    scale_row = jnp.minimum(scale_row, product.num_scale_rows - 1)
    xs, numbers = tile.load_int4(first) if product.kind == "int4" else tile.load_bytes(first)
    zeros = tile.load_zeros(scale_row) if product.offset == "zero" else None
    total = acc if product.is_scaled_at_the_end else jnp.zeros_like(acc)
    for x, part in zip(xs, numbers, strict=True):
        total += _dot(x, _decode(part, zeros, product, x.dtype))
    if product.is_scaled_at_the_end:
        return total
    acc += total * tile.load_scales(scale_row)
    if product.offset == "least":
        stretch = lax.div(first, jnp.int32(product.depth))
        acc += tile.load_sums(stretch) * tile.load_leasts(scale_row)
    return acc


def _dot(x: jax.Array, values: jax.Array) -> jax.Array:
    """[tile_m depth] by [tile_f depth], summed in float32; float32 at full precision."""
    return lax.dot_general(
        x,
        values,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _decode(
    numbers: jax.Array, zeros: jax.Array | None, product: _Product, dtype: jnp.dtype
) -> jax.Array:
    """numbers [tile_f depth] less their zeros [tile_f 1], in the dtype of x: exactly."""
    if product.kind in float8.FORMATS:
        return float8.decode(numbers, product.kind, dtype)
    if product.kind == "int8":
        values = numbers.astype(dtype)
        return values if zeros is None else values - zeros.astype(dtype)
    # Half the instructions of a conversion.
    anchor, bits = _ANCHORS[dtype.name]
    wide = numbers.astype(jnp.uint32 if dtype.itemsize == 4 else jnp.uint16)
    values = lax.bitcast_convert_type(wide | bits, dtype)
    if zeros is not None:
        return values - (zeros.astype(dtype) + anchor)
    return values - (anchor if product.offset == "least" else anchor + INT4_MIDDLE)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """What a program reads of. Zeros stand for what lies behind an array's end."""

    refs: tuple[Any, ...]  # as `_launch` has them
    rows: jax.Array  # i32[tile_m]
    outputs: jax.Array  # i32[tile_f]
    product: _Product

    def load_bytes(self, first: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """x [tile_m depth] and numbers [tile_f depth] of the inputs from `first` on."""
        inputs = first + lax.iota(jnp.int32, self.product.depth)
        return [self._load_x(inputs)], [self._load_numbers(inputs, self.product.stored_inputs)]

    def load_int4(self, first: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """The same in two parts, as the halves of bytes belong to different inputs."""
        byte = lax.iota(jnp.int32, self.product.depth // 2)
        half = jnp.full_like(byte, HALF)
        low = first + lax.div(byte, half) * RUN + lax.rem(byte, half)
        stored = lax.div(first, jnp.int32(2)) + byte
        packed = self._load_numbers(stored, self.product.stored_inputs // 2)
        return [self._load_x(low), self._load_x(low + HALF)], [packed & 15, packed >> 4]

    def load_scales(self, row: jax.Array) -> jax.Array:
        """f32[1 tile_f]"""
        span = self.product.outputs_per_scale
        column = (
            self.outputs if span == 1 else lax.div(self.outputs, jnp.full_like(self.outputs, span))
        )
        return _load(self.refs[2].at[row, column], self._has_output()).astype(jnp.float32)[None, :]

    def load_zeros(self, row: jax.Array) -> jax.Array:
        """[tile_f 1], of the numbers' type."""
        return _load(self.refs[3].at[row, self.outputs], self._has_output())[:, None]

    def load_leasts(self, row: jax.Array) -> jax.Array:
        """f32[1 tile_f]"""
        leasts = _load(self.refs[3].at[row, self.outputs], self._has_output())
        return leasts.astype(jnp.float32)[None, :]

    def load_sums(self, stretch: jax.Array) -> jax.Array:
        """f32[tile_m 1]"""
        return _load(self.refs[4].at[stretch, self._own_rows()], None)[:, None]

    def _load_x(self, inputs: jax.Array) -> jax.Array:
        at = self.refs[0].at[self._own_rows()[:, None], inputs[None, :]]
        if self.product.D % self.product.tiling.tile_d == 0:
            return _load(at, None)
        is_input = (inputs < self.product.D)[None, :]
        return _load(at, jnp.broadcast_to(is_input, (self.rows.size, inputs.size)))

    def _load_numbers(self, stored: jax.Array, num_stored: int) -> jax.Array:
        at = self.refs[1].at[self.outputs[:, None], stored[None, :]]
        mask = self._has_output()
        if mask is not None:
            mask = jnp.broadcast_to(mask[:, None], (mask.size, stored.size))
        if self.product.stored_inputs % self.product.tiling.tile_d:
            is_stored = (stored < num_stored)[None, :]
            is_stored = jnp.broadcast_to(is_stored, (self.outputs.size, stored.size))
            mask = is_stored if mask is None else mask & is_stored
        return _load(at, mask)

    def _own_rows(self) -> jax.Array:
        """Rows behind the last are it once more: what they give is not stored."""
        return jnp.minimum(self.rows, self.product.M - 1)

    def _has_output(self) -> jax.Array | None:
        """bool[tile_f], None where all tiles are full."""
        is_full = self.product.F % self.product.tiling.tile_f == 0
        return None if is_full else self.outputs < self.product.F


def _load(at: Any, mask: jax.Array | None) -> jax.Array:
    return pltriton.load(at) if mask is None else pltriton.load(at, mask=mask, other=0)
