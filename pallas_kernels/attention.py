"""What both attention kernels are made of: reading keys through a block table, the online softmax.

Runs inside kernels, for a few queries of one row of the batch and one KV head. Owns the order of
the arithmetic: a query's result is built key tile by key tile, and no step of it looks at another
query. A tile that a query does not see leaves its softmax as it was, to the bit.

Scores are in bits: multiplied by log2(e), as exp2 is what the hardware has.

Queries, values and results are in pieces. Mostly that is one, all columns; of a cache of 8 bits, if
heads are large, it is four, of every fourth column each, or two (see `words`).
"""

import functools as ft
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import float8, words

LOG2_E = math.log2(math.e)
LOWEST = -1e30  # where peaks begin; finite, so that a masked score of -inf gets a weight of 0
EIGHT_BIT = ("int8", *float8.FORMATS)


class Rule(NamedTuple):
    """Who sees what, how scores are shaped, what the cache's numbers are. Static."""

    scale: float
    window: int | None
    soft_cap: float | None
    kv_dtype: str


class Cache(NamedTuple):
    """One layer's keys and values in device memory: arrays outside of a kernel, refs inside."""

    k: Any  # [N S K C], as it is stored, or in words [N S K C/pieces]
    v: Any  # the same
    k_scale: Any  # None, float32 [1] for all, or float32 [N S K]
    v_scale: Any
    block_table: Any  # i32[B M]


class Slots(NamedTuple):
    """Where the keys of a tile are: one place in the pool each."""

    position: jax.Array  # i32[tile_kv]
    block_id: jax.Array  # i32[tile_kv], 0 where nobody looks
    offset: jax.Array  # i32[tile_kv], within the block
    is_live: jax.Array  # bool[tile_kv]: some query sees it


class Queries(NamedTuple):
    """Queries of one KV head, some heads of its group or several tokens of them all."""

    pieces: tuple[jax.Array, ...]  # [rows width], in `product_dtype`
    factor: jax.Array | None  # f32[rows]; times this, where there is one, a piece is the query's
    position: jax.Array  # i32[rows]; -1 sees nothing


class Softmax(NamedTuple):
    """Sums of weights and of weighted values, relative to the highest score so far."""

    peak: jax.Array  # f32[rows], in bits
    total: jax.Array  # f32[rows]
    value: tuple[jax.Array, ...]  # f32[rows width] each, in pieces, in units
    unit: jax.Array | None  # f32[rows], a power of two not far below the largest weighted scale


def make_cache(
    k: jax.Array,
    v: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    block_table: jax.Array,
    kv_dtype: str,
) -> Cache:
    """The arguments of a kernel as one tree. A scale for all, float32 [], gets an axis."""
    k_scale, v_scale = (x if x is None or x.ndim else x.reshape(1) for x in (k_scale, v_scale))
    if num_pieces(k.shape[3], kv_dtype) > 1:
        k, v = words.as_words(k), words.as_words(v)
    return Cache(k, v, k_scale, v_scale, block_table)


def num_pieces(head_dim: int, kv_dtype: str) -> int:
    """Pieces of queries and values."""
    return words.num_pieces(head_dim) if kv_dtype in EIGHT_BIT else 1


def product_dtype(q_dtype: jax.typing.DTypeLike, kv_dtype: str) -> jnp.dtype:
    """What queries, weights, keys and values are multiplied in (the sums are float32).

    float32 where the types of queries and cache differ; but all numbers of 8 bits are numbers of
    float16 too.
    """
    if kv_dtype in EIGHT_BIT:
        return jnp.dtype(jnp.float32 if q_dtype == jnp.float32 else jnp.float16)
    return jnp.dtype(q_dtype if q_dtype == kv_dtype else jnp.float32)


def load_queries(
    q_ref: Any,
    at: tuple[jax.Array, ...],
    *,
    position: jax.Array,
    is_ours: jax.Array,
    width: int,
    rule: Rule,
) -> Queries:
    """Reads queries from [.. C].

    Args:
        q_ref: all queries.
        at: i32[rows] or i32[] for each axis but the last.
        position: i32[rows].
        is_ours: bool[rows]; the others are zeros.
        width: C, padded to a power of two.
        rule: see `Rule`.
    """
    num = num_pieces(q_ref.shape[-1], rule.kv_dtype)
    dtype = product_dtype(q_ref.dtype, rule.kv_dtype)
    pieces = []
    for piece in range(num):
        index, mask = _elements(q_ref, at, is_ours, piece, num, width)
        pieces.append(pltriton.load(q_ref.at[index], mask=mask, other=0))
    factor = None
    if dtype == jnp.float16 and q_ref.dtype == jnp.bfloat16:
        pieces, factor = _fit_float16(pieces)
    return Queries(tuple(x.astype(dtype) for x in pieces), factor, position)


def store_pieces(
    out_ref: Any,
    at: tuple[jax.Array, ...],
    pieces: tuple[jax.Array, ...],
    *,
    is_ours: jax.Array,
    width: int,
) -> None:
    """Writes pieces where `load_queries` would read them, in the type of `out_ref`."""
    for piece, x in enumerate(pieces):
        index, mask = _elements(out_ref, at, is_ours, piece, len(pieces), width)
        pltriton.store(out_ref.at[index], x.astype(out_ref.dtype), mask=mask)


def first_visible(position: jax.Array, rule: Rule) -> jax.Array:
    """The lowest position that a query at `position` sees, i32 like it."""
    if rule.window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - (rule.window - 1), 0)


def empty_softmax(queries: Queries, cache: Cache) -> Softmax:
    """The softmax of no keys.

    Weights times the scales of values may be too large for float16, or too small: then there is
    a unit.
    """
    rows = queries.position.shape
    has_unit = _is_by_token(cache.v_scale) and queries.pieces[0].dtype == jnp.float16
    return Softmax(
        peak=jnp.full(rows, LOWEST, jnp.float32),
        total=jnp.zeros(rows, jnp.float32),
        value=tuple(jnp.zeros(x.shape, jnp.float32) for x in queries.pieces),
        unit=jnp.zeros(rows, jnp.float32) if has_unit else None,
    )


def find_slots(
    cache: Cache,
    tile: jax.Array,
    *,
    row: jax.Array,
    first: jax.Array,
    last: jax.Array,
    tile_kv: int,
) -> Slots:
    """Looks up the keys at positions `tile * tile_kv` on, of which `first` to `last` are live.

    The table is not read elsewhere: there it may hold anything.
    """
    block_size = jnp.int32(cache.k.shape[1])
    position = tile * tile_kv + lax.iota(jnp.int32, tile_kv)
    is_live = (position >= first) & (position <= last)
    column = lax.div(position, jnp.broadcast_to(block_size, position.shape))
    block_id = pltriton.load(cache.block_table.at[row, column], mask=is_live, other=0)
    return Slots(position, block_id, position - column * block_size, is_live)


def add_tile(
    softmax: Softmax, queries: Queries, slots: Slots, cache: Cache, head: jax.Array, rule: Rule
) -> Softmax:
    """Takes the keys and values in `slots` into the softmax.

    Args:
        softmax: of the keys before.
        queries: as `load_queries` gives them.
        slots: the tile.
        cache: refs.
        head: i32[], the KV head.
        rule: see `Rule`.
    """
    scores = _scores(queries, slots, cache, head, rule)
    is_visible = slots.position[None, :] <= queries.position[:, None]
    if rule.window is not None:
        is_visible &= slots.position[None, :] > (queries.position - rule.window)[:, None]
    scores = jnp.where(is_visible, scores, -jnp.inf)
    peak = jnp.maximum(softmax.peak, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - peak[:, None])
    decay = jnp.exp2(softmax.peak - peak)
    total = softmax.total * decay + jnp.sum(weights, axis=1)

    unit = softmax.unit
    if _is_by_token(cache.v_scale):
        weights *= _read_scale(cache.v_scale, slots, head)[None, :]
    if unit is not None:
        old_unit = unit * decay
        unit = _power_of_two(jnp.maximum(old_unit, jnp.max(weights, axis=1)))
        inverse = _inverse(unit)
        weights *= inverse[:, None]
        decay = old_unit * inverse
    weights = weights.astype(queries.pieces[0].dtype)
    v = _read(cache.v, slots, head, queries, rule)
    value = (
        sums * decay[:, None] + _dot(weights, x, contract=0)
        for sums, x in zip(softmax.value, v, strict=True)
    )
    return Softmax(peak, total, tuple(value), unit)


def finish(
    softmax: Softmax, cache: Cache, sink: jax.Array | None, rule: Rule
) -> tuple[jax.Array, ...]:
    """The weighted mean of the values, f32[rows width] in pieces; zeros where no key was seen.

    Args:
        softmax: of all keys.
        cache: refs; a value scale for all is applied here.
        sink: f32[rows] or None, a score per query that has a weight and no value.
        rule: see `Rule`.
    """
    peak, total, value, unit = softmax
    factor = _decode_factor(len(value), rule)
    if unit is not None:
        factor *= unit
    if cache.v_scale is not None and not _is_by_token(cache.v_scale):
        factor *= cache.v_scale[0]
    if sink is not None:
        sink = sink * LOG2_E
        new_peak = jnp.maximum(peak, sink)
        decay = jnp.exp2(peak - new_peak)
        total = total * decay + jnp.exp2(sink - new_peak)
        factor *= decay
    factor *= _inverse(total)
    return tuple(x * factor[:, None] for x in value)


def _elements(
    ref: Any, at: tuple[jax.Array, ...], is_ours: jax.Array, piece: int, num: int, width: int
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Where a piece of some rows of [.. C] is, and which of its elements there are."""
    column = lax.iota(jnp.int32, width // num) * num + piece
    rows = (x[:, None] if x.ndim else x for x in at)
    return (*rows, column[None, :]), is_ours[:, None] & (column < ref.shape[-1])[None, :]


def _fit_float16(pieces: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """bfloat16 [rows width] as float32 between -2 and 2, and f32[rows] that this is to be times.

    By powers of two: float16 then has every bit of what is not tiny beside its row's largest.
    """
    wide = [x.astype(jnp.float32) for x in pieces]
    largest = ft.reduce(jnp.maximum, (jnp.max(jnp.abs(x), axis=1) for x in wide))
    factor = _power_of_two(largest)
    return [x * _inverse(factor)[:, None] for x in wide], factor


def _power_of_two(x: jax.Array) -> jax.Array:
    """The largest one up to x, of a float32 that is not negative; 0 of what is below all normal."""
    exponent = lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    return lax.bitcast_convert_type(exponent, jnp.float32)


def _inverse(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0, 1 / x, 0)


def _scores(queries: Queries, slots: Slots, cache: Cache, head: jax.Array, rule: Rule) -> jax.Array:
    """f32[rows tile_kv], in bits, before any mask."""
    k = _read(cache.k, slots, head, queries, rule)
    products = (_dot(x, y, contract=1) for x, y in zip(queries.pieces, k, strict=True))
    scores = ft.reduce(jnp.add, products)
    factor = rule.scale * LOG2_E if rule.soft_cap is None else rule.scale / rule.soft_cap
    factor *= _decode_factor(len(k), rule)
    if queries.factor is not None:
        scores *= queries.factor[:, None]
    if cache.k_scale is None:
        scores *= factor
    elif _is_by_token(cache.k_scale):
        scores *= (_read_scale(cache.k_scale, slots, head) * factor)[None, :]
    else:
        scores *= cache.k_scale[0] * factor
    if rule.soft_cap is None:
        return scores
    return jnp.tanh(scores) * (rule.soft_cap * LOG2_E)


def _read(
    pool: Any, slots: Slots, head: jax.Array, queries: Queries, rule: Rule
) -> tuple[jax.Array, ...]:
    """[tile_kv width] of one head, in pieces and in a type like the queries'.

    Short of `_decode_factor`. Zeros where nobody looks, and behind the head dim.
    """
    (_, width), dtype = queries.pieces[0].shape, queries.pieces[0].dtype
    column = lax.iota(jnp.int32, width)
    mask = slots.is_live[:, None]
    if width != pool.shape[3]:
        mask &= (column < pool.shape[3])[None, :]
    at = pool.at[slots.block_id[:, None], slots.offset[:, None], head, column[None, :]]
    stored = pltriton.load(at, mask=mask, other=0)
    if len(queries.pieces) > 1:
        return tuple(x.astype(dtype) for x in words.decode(stored, rule.kv_dtype))
    if rule.kv_dtype in float8.FORMATS:
        return (float8.decode(stored, rule.kv_dtype, dtype),)
    return (stored.astype(dtype),)


def _decode_factor(num: int, rule: Rule) -> float:
    """What numbers of the cache are to be multiplied by if they are read in `num` pieces."""
    return words.FACTOR[rule.kv_dtype] if num > 1 else 1.0


def _read_scale(scale: Any, slots: Slots, head: jax.Array) -> jax.Array:
    """f32[tile_kv]"""
    at = scale.at[slots.block_id, slots.offset, head]
    return pltriton.load(at, mask=slots.is_live, other=0)


def _is_by_token(scale: Any) -> bool:
    return scale is not None and len(scale.shape) == 3


def _dot(x: jax.Array, y: jax.Array, *, contract: int) -> jax.Array:
    """x's last axis with axis `contract` of y, summed in float32; float32 at full precision."""
    return lax.dot_general(
        x,
        y,
        (((1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
