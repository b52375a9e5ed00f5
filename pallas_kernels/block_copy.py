"""Whole blocks of the pools copied over others, in place.

Owns the order: all reads come before all writes, so a block may be read by one copy and written by
another. Programs run in any order, hence two kernels: one takes the blocks aside, one puts them
down. What is taken aside is as large as the blocks named, and not as the pool.
"""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.tiling import power_of_two


def block_copy(
    pools: tuple[jax.Array, ...], src: jax.Array, dst: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Copies block `src[w]` over `dst[w]` in every pool; returns them, which are the same memory.

    A copy of a block over itself is none: padding names the null block twice. No other block may
    be written twice.

    Args:
        pools: [N S K C] or [N S K] each, of any types: keys, values, their scales.
        src: int32 [W], blocks to read.
        dst: int32 [W], blocks to write.
        interpret: runs on a CPU, in XLA.

    Raises:
        ValueError: shapes or types that do not go together.
    """
    _check(pools, src, dst)
    W, S = src.shape[0], pools[0].shape[1]
    if W == 0:
        return pools
    whole = pl.BlockSpec(memory_space=pl.ANY)
    specs = (whole,) * len(pools)
    options: dict[str, Any] = {
        "grid": (W, S),
        "out_specs": specs,
        "compiler_params": pltriton.CompilerParams(num_warps=4, num_stages=1),
        "interpret": interpret,
    }
    taken = pl.pallas_call(
        _take,
        in_specs=[whole, whole, specs],
        out_shape=tuple(jax.ShapeDtypeStruct((W, *x.shape[1:]), x.dtype) for x in pools),
        name="block_copy_take",
        **options,
    )(src, dst, pools)
    return pl.pallas_call(
        _put,
        in_specs=[whole, whole, specs, specs],
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools),
        input_output_aliases={2 + len(pools) + i: i for i in range(len(pools))},
        name="block_copy_put",
        **options,
    )(src, dst, taken, pools)


def _take(
    src_ref: Any,  # i32[W]
    dst_ref: Any,  # i32[W]
    pools: tuple[Any, ...],  # [N S ...]
    *taken: Any,  # [W S ...]
):
    """One slot of one block."""
    w, slot = pl.program_id(0), pl.program_id(1)
    source = src_ref[w]

    @pl.when(source != dst_ref[w])
    def _():
        for pool, out in zip(pools, taken, strict=True):
            _copy_slot(pool, (source, slot), out, (w, slot))


def _put(
    src_ref: Any,  # i32[W]
    dst_ref: Any,  # i32[W]
    taken: tuple[Any, ...],  # [W S ...]
    old: tuple[Any, ...],  # the same memory as `pools`
    *pools: Any,  # [N S ...]
):
    """One slot of one block."""
    del old
    w, slot = pl.program_id(0), pl.program_id(1)
    target = dst_ref[w]

    @pl.when(src_ref[w] != target)
    def _():
        for kept, pool in zip(taken, pools, strict=True):
            _copy_slot(kept, (w, slot), pool, (target, slot))


def _copy_slot(source: Any, source_at: tuple, target: Any, target_at: tuple) -> None:
    """All that lies under two indices, [K C] or [K], in one tensor with padding masked away."""
    sizes = source.shape[2:]
    widths = [power_of_two(size, 1) for size in sizes]
    index = [
        lax.broadcasted_iota(
            jnp.int32, [width if i == axis else 1 for i in range(len(sizes))], axis
        )
        for axis, width in enumerate(widths)
    ]
    is_there = [along < size for along, size in zip(index, sizes, strict=True)]
    mask = None if widths == list(sizes) else ft.reduce(jnp.logical_and, is_there)
    x = pltriton.load(source.at[(*source_at, *index)], mask=mask, other=None if mask is None else 0)
    pltriton.store(target.at[(*target_at, *index)], x, mask=mask)


def _check(pools: tuple[jax.Array, ...], src: jax.Array, dst: jax.Array) -> None:
    if not pools or any(x.ndim not in (3, 4) or x.shape[:2] != pools[0].shape[:2] for x in pools):
        shapes = [x.shape for x in pools]
        raise ValueError(f"pools must be [N S K C] or [N S K], of the same blocks; got {shapes}")
    if src.ndim != 1 or src.shape != dst.shape or {src.dtype, dst.dtype} != {jnp.dtype("int32")}:
        raise ValueError(
            f"src is {src.dtype} {src.shape}, dst {dst.dtype} {dst.shape}; both must be int32 [W]"
        )
