"""New keys and values into their slots of the pools, in place; and RoPE on the way, if asked.

Owns how a token's heads reach the pool: turned, scaled, rounded to the pool's type, each number
read and written once. One program takes all heads of one token. Tokens of the null block, which
are padding, are not written.
"""

import functools as ft
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import eight_bit
from pallas_kernels.checks import check_pools, check_scale
from pallas_kernels.tiling import power_of_two


class Pools(NamedTuple):
    """One layer's keys and values, with scales in 8 bits: arrays outside of a kernel, refs inside.

    k, v: [N S K C] as they are stored. k_scale, v_scale: None, float32 [] or float32 [N S K].
    """

    k: Any
    v: Any
    k_scale: Any = None
    v_scale: Any = None


class _New(NamedTuple):
    """What a step brings. Refs inside the kernel."""

    slot_mapping: Any  # i32[T]
    k: Any  # [T K C]
    v: Any  # [T K C]
    q: Any = None  # [T H C]
    cos: Any = None  # f32[T X]
    sin: Any = None  # f32[T X]
    k_scale: Any = None  # f32[1] for all tokens; those of tokens and heads are in the pools
    v_scale: Any = None


class _Part(NamedTuple):
    """Neighbouring dimensions of all heads of a token."""

    place: tuple[jax.Array, jax.Array]  # i32[heads 1] and i32[1 columns]
    mask: jax.Array | None  # bool[heads columns]; None where there is no padding


def write_kv(
    pools: Pools,
    k_new: jax.Array,
    v_new: jax.Array,
    slot_mapping: jax.Array,
    *,
    kv_dtype: str,
    interpret: bool = False,
) -> Pools:
    """Writes T tokens into their slots and returns the pools, which are the same memory.

    Slot s is place `s % S` of block `s // S`; those of block 0 are padding and are left out. No
    two other tokens may have one slot. Pools of 8 bits take the nearest number, after a product
    with the scale's inverse: of the one that is given for all or, [N S K], of each head's own,
    which is written too: `eight_bit.head_scale` of its largest magnitude.

    Args:
        pools: to write to; see `Pools`.
        k_new: [T K C] bfloat16, float16 or float32.
        v_new: as k_new.
        slot_mapping: int32 [T].
        kv_dtype: what the pools' numbers are, see `checks.STORAGE`.
        interpret: runs on a CPU, in XLA.

    Raises:
        ValueError: shapes or types that do not go together.
    """
    _check(pools, k_new, v_new, slot_mapping, kv_dtype)
    new = _New(slot_mapping, k_new, v_new)
    (pools,) = _call(pools, new, kv_dtype=kv_dtype, interpret=interpret)
    return pools


def turn_and_write(
    pools: Pools,
    q: jax.Array,
    k_new: jax.Array,
    v_new: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    *,
    kv_dtype: str,
    interpret: bool = False,
) -> tuple[jax.Array, Pools]:
    """`write_kv` of keys turned by RoPE, and the queries turned likewise: (queries, pools).

    Dimension i of a head is paired with i + X, as in Hugging Face checkpoints: of those two,
    (a, b) becomes (a cos - b sin, b cos + a sin), in float32, rounded to the type they came in.
    Dimensions from 2 X on pass.

    Args:
        pools: see `write_kv`.
        q: [T H C] bfloat16, float16 or float32.
        k_new: see `write_kv`.
        v_new: see `write_kv`.
        cos: float32 [T X] of each token's angles, X up to C / 2.
        sin: as cos.
        slot_mapping: see `write_kv`.
        kv_dtype: see `write_kv`.
        interpret: see `write_kv`.

    Raises:
        ValueError: shapes or types that do not go together.
    """
    _check(pools, k_new, v_new, slot_mapping, kv_dtype)
    T, _, C = k_new.shape
    if q.ndim != 3 or q.shape[::2] != (T, C):
        raise ValueError(f"q of shape {q.shape} must be [T H C] = [{T} H {C}], as k_new is")
    if cos.ndim != 2 or cos.shape != sin.shape or cos.shape[0] != T or 2 * cos.shape[1] > C:
        raise ValueError(
            f"cos {cos.shape} and sin {sin.shape} must be [T X] = [{T} X], with X up to {C // 2}"
        )
    new = _New(slot_mapping, k_new, v_new, q, cos, sin)
    pools, q = _call(pools, new, kv_dtype=kv_dtype, interpret=interpret)
    return q, pools


def _call(pools: Pools, new: _New, *, kv_dtype: str, interpret: bool) -> tuple[Any, ...]:
    """The pools and, if there were queries, those."""
    if new.k.shape[0] == 0:
        return (pools,) if new.q is None else (pools, new.q)
    given = pools
    for name in ("k_scale", "v_scale"):
        scale = getattr(pools, name)
        if scale is not None and scale.ndim == 0:  # only read: no result of the kernel
            new = new._replace(**{name: scale.reshape(1)})
            pools = pools._replace(**{name: None})

    out = (pools,) if new.q is None else (pools, new.q)
    num_new, num_pools = len(jax.tree.leaves(new)), len(jax.tree.leaves(pools))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    T, K, C = new.k.shape
    written, *q = pl.pallas_call(
        ft.partial(_kernel, kv_dtype=kv_dtype),
        grid=(T,),
        in_specs=jax.tree.map(lambda _: whole, (new, pools)),
        out_specs=jax.tree.map(lambda _: whole, out),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out),
        input_output_aliases={num_new + i: i for i in range(num_pools)},
        compiler_params=pltriton.CompilerParams(num_warps=_num_warps(K * C), num_stages=1),
        interpret=interpret,
        name="kv_write",
    )(new, pools)
    kept = {
        name: getattr(given, name)
        for name in ("k_scale", "v_scale")
        if getattr(written, name) is None
    }
    return written._replace(**kept), *q


def _num_warps(num_elements: int) -> int:
    """So that each of a warp's 32 threads has 8 numbers, 16 bytes of them in half precision."""
    return min(power_of_two(math.ceil(num_elements / (32 * 8)), 1), 8)


def _kernel(new: _New, old: Pools, pools: Pools, q_ref: Any = None, *, kv_dtype: str):
    """One token."""
    del old  # the same memory as `pools`
    token = pl.program_id(0)
    slot = new.slot_mapping[token]
    block_size = pools.k.shape[1]
    turn = _read_turn(new, token)
    if q_ref is not None:
        parts = _parts(new.q, new.cos)
        _store_parts(q_ref, (token,), parts, _turned(_load_parts(new.q, token, parts), turn))

    @pl.when(slot >= block_size)
    def _():
        place = lax.div(slot, jnp.int32(block_size)), lax.rem(slot, jnp.int32(block_size))
        parts = _parts(new.k, new.cos)
        x = _turned(_load_parts(new.k, token, parts), turn)
        _write(pools.k, pools.k_scale, new.k_scale, place, parts, x, kv_dtype)
        parts = _parts(new.v, None)
        x = _load_parts(new.v, token, parts)
        _write(pools.v, pools.v_scale, new.v_scale, place, parts, x, kv_dtype)


def _write(
    pool: Any,
    scale_ref: Any,
    given_scale: Any,
    place: tuple[jax.Array, jax.Array],
    parts: list[_Part],
    x: list[jax.Array],
    kv_dtype: str,
) -> None:
    """Stores all heads, part by part, as the pool's numbers. place: block and slot within it."""
    if kv_dtype not in eight_bit.LARGEST:
        _store_parts(pool, place, parts, [part.astype(pool.dtype) for part in x])
        return
    x = [part.astype(jnp.float32) for part in x]
    if given_scale is not None:
        x = [part * (1 / given_scale[0]) for part in x]
    elif scale_ref is not None:
        peaks = [jnp.max(jnp.abs(part), axis=1) for part in x]
        scale = eight_bit.head_scale(ft.reduce(jnp.maximum, peaks), kv_dtype)
        _store_heads(scale_ref, place, scale)
        x = [part * (1 / scale)[:, None] for part in x]
    _store_parts(pool, place, parts, [eight_bit.encode(part, kv_dtype) for part in x])


# --- A token's heads, in tensors whose sizes are powers of two, as Triton has them ---


def _parts(ref: Any, cos_ref: Any) -> list[_Part]:
    """All dimensions of [T heads C]: in one part, or in two that RoPE pairs and the rest."""
    _, num_heads, C = ref.shape
    X = 0 if cos_ref is None else cos_ref.shape[1]
    spans = [(0, X), (X, X), (2 * X, C - 2 * X)]
    return [_part(num_heads, start, width) for start, width in spans if width]


def _part(num_heads: int, start: int, width: int) -> _Part:
    head = lax.iota(jnp.int32, power_of_two(num_heads, 1))
    column = lax.iota(jnp.int32, power_of_two(width, 1))
    is_padded = head.size > num_heads or column.size > width
    mask = (head < num_heads)[:, None] & (column < width)[None, :] if is_padded else None
    return _Part((head[:, None], start + column[None, :]), mask)


def _load(ref: Any, index: tuple, mask: jax.Array | None) -> jax.Array:
    return pltriton.load(ref.at[index], mask=mask, other=None if mask is None else 0)


def _load_parts(ref: Any, token: jax.Array, parts: list[_Part]) -> list[jax.Array]:
    return [_load(ref, (token, *part.place), part.mask) for part in parts]


def _store_parts(ref: Any, place: tuple, parts: list[_Part], x: list[jax.Array]) -> None:
    for part, values in zip(parts, x, strict=True):
        pltriton.store(ref.at[(*place, *part.place)], values, mask=part.mask)


def _store_heads(ref: Any, place: tuple, x: jax.Array) -> None:
    """A number for each head: x [heads]."""
    head = lax.iota(jnp.int32, x.size)
    mask = head < ref.shape[2] if x.size > ref.shape[2] else None
    pltriton.store(ref.at[(*place, head)], x, mask=mask)


def _read_turn(new: _New, token: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """cos and sin of a token's angles, float32 [1 columns]."""
    if new.cos is None:
        return None
    X = new.cos.shape[1]
    column = lax.iota(jnp.int32, power_of_two(X, 1))
    mask = column < X if column.size > X else None
    cos, sin = (_load(ref, (token, column), mask)[None, :] for ref in (new.cos, new.sin))
    return cos, sin


def _turned(x: list[jax.Array], turn: tuple[jax.Array, jax.Array] | None) -> list[jax.Array]:
    if turn is None:
        return x
    (cos, sin), (first, second) = turn, (part.astype(jnp.float32) for part in x[:2])
    turned = first * cos - second * sin, second * cos + first * sin
    return [part.astype(x[0].dtype) for part in turned] + x[2:]


# --- Checks ---


def _check(
    pools: Pools, k_new: jax.Array, v_new: jax.Array, slot_mapping: jax.Array, kv_dtype: str
) -> None:
    check_pools(pools.k, pools.v, kv_dtype)
    _, _, K, C = pools.k.shape
    if k_new.shape != v_new.shape or k_new.shape[1:] != (K, C):
        raise ValueError(
            f"k_new {k_new.shape} and v_new {v_new.shape} must be [T K C] = [T {K} {C}], as the "
            f"pools are"
        )
    if slot_mapping.shape != k_new.shape[:1] or slot_mapping.dtype != jnp.int32:
        raise ValueError(
            f"slot_mapping is {slot_mapping.dtype} {slot_mapping.shape}; it must be int32 "
            f"{k_new.shape[:1]}"
        )
    for name in ("k_scale", "v_scale"):
        scale = getattr(pools, name)
        check_scale(name, scale, pools.k)
        if scale is not None and kv_dtype not in eight_bit.LARGEST:
            raise ValueError(f"pools of {kv_dtype=} have no {name}; 8-bit pools may have one")
