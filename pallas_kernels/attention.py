"""What both attention kernels are made of: reading keys through a block table, the online softmax.

Runs inside kernels, for a few queries of one row of the batch and one KV head. Owns the order of
the arithmetic: a query's result is built key tile by key tile, and no step of it looks at another
query. A tile that a query does not see leaves its softmax as it was, to the bit.

Scores are in bits: multiplied by log2(e), as exp2 is what the hardware has.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import float8

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

    k: Any  # [N S K C], as it is stored
    v: Any  # [N S K C]
    k_scale: Any  # None, float32 [1] for all, or float32 [N S K]
    v_scale: Any
    block_table: Any  # i32[B M]


class Slots(NamedTuple):
    """Where the keys of a tile are: one place in the pool each."""

    position: jax.Array  # i32[tile_kv]
    block_id: jax.Array  # i32[tile_kv], 0 where nobody looks
    offset: jax.Array  # i32[tile_kv], within the block
    is_live: jax.Array  # bool[tile_kv]: some query sees it


class Softmax(NamedTuple):
    """Sums of weights and of weighted values, relative to the highest score so far."""

    peak: jax.Array  # f32[rows], in bits
    total: jax.Array  # f32[rows]
    value: jax.Array  # f32[rows width]


def make_cache(
    k: jax.Array,
    v: jax.Array,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    block_table: jax.Array,
) -> Cache:
    """The arguments of a kernel as one tree. A scale for all, float32 [], gets an axis."""
    k_scale, v_scale = (x if x is None or x.ndim else x.reshape(1) for x in (k_scale, v_scale))
    return Cache(k, v, k_scale, v_scale, block_table)


def product_dtype(q_dtype: jax.typing.DTypeLike, kv_dtype: str) -> jnp.dtype:
    """What queries, weights, keys and values are multiplied in (the sums are float32).

    The wider type of queries and cache; numbers of 8 bits are exact in any type of queries.
    """
    if kv_dtype in EIGHT_BIT:
        return jnp.dtype(q_dtype)
    return jnp.promote_types(q_dtype, jnp.dtype(kv_dtype))


def first_visible(position: jax.Array, rule: Rule) -> jax.Array:
    """The lowest position that a query at `position` sees, i32 like it."""
    if rule.window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - (rule.window - 1), 0)


def empty_softmax(rows: int, width: int) -> Softmax:
    """The softmax of no keys."""
    return Softmax(
        peak=jnp.full((rows,), LOWEST, jnp.float32),
        total=jnp.zeros((rows,), jnp.float32),
        value=jnp.zeros((rows, width), jnp.float32),
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
    softmax: Softmax,
    q: jax.Array,
    q_position: jax.Array,
    slots: Slots,
    cache: Cache,
    head: jax.Array,
    rule: Rule,
) -> Softmax:
    """Takes the keys and values in `slots` into the softmax.

    Args:
        softmax: of the keys before.
        q: [rows width] in `product_dtype`; width is the head dim or more, zeros behind it.
        q_position: i32[rows]; -1 sees nothing.
        slots: the tile.
        cache: refs.
        head: i32[], the KV head.
        rule: see `Rule`.
    """
    scores = _scores(q, slots, cache, head, rule)
    is_visible = slots.position[None, :] <= q_position[:, None]
    if rule.window is not None:
        is_visible &= slots.position[None, :] > (q_position - rule.window)[:, None]
    scores = jnp.where(is_visible, scores, -jnp.inf)
    peak = jnp.maximum(softmax.peak, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - peak[:, None])
    decay = jnp.exp2(softmax.peak - peak)
    total = softmax.total * decay + jnp.sum(weights, axis=1)

    v = _read(cache.v, slots, head, width=q.shape[1], dtype=q.dtype, rule=rule)
    if _is_by_token(cache.v_scale):
        weights *= _read_scale(cache.v_scale, slots, head)[None, :]
    value = softmax.value * decay[:, None] + _dot(weights.astype(q.dtype), v, contract=0)
    return Softmax(peak, total, value)


def finish(softmax: Softmax, cache: Cache, sink: jax.Array | None) -> jax.Array:
    """The weighted mean of the values, f32[rows width]; zeros where no key was seen.

    Args:
        softmax: of all keys.
        cache: refs; a value scale for all is applied here.
        sink: f32[rows] or None, a score per query that has a weight and no value.
    """
    peak, total, value = softmax
    if sink is not None:
        sink = sink * LOG2_E
        new_peak = jnp.maximum(peak, sink)
        decay = jnp.exp2(peak - new_peak)
        total = total * decay + jnp.exp2(sink - new_peak)
        value = value * decay[:, None]
    factor = jnp.where(total > 0, 1 / total, 0)
    if cache.v_scale is not None and not _is_by_token(cache.v_scale):
        factor *= cache.v_scale[0]
    return value * factor[:, None]


def _scores(q: jax.Array, slots: Slots, cache: Cache, head: jax.Array, rule: Rule) -> jax.Array:
    """f32[rows tile_kv], in bits, before any mask."""
    k = _read(cache.k, slots, head, width=q.shape[1], dtype=q.dtype, rule=rule)
    scores = _dot(q, k, contract=1)
    factor = rule.scale * LOG2_E if rule.soft_cap is None else rule.scale / rule.soft_cap
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
    pool: Any, slots: Slots, head: jax.Array, *, width: int, dtype: jnp.dtype, rule: Rule
) -> jax.Array:
    """[tile_kv width] of one head, zeros where nobody looks and behind the head dim."""
    C = pool.shape[3]
    column = lax.iota(jnp.int32, width)
    mask = slots.is_live[:, None]
    if width != C:
        mask &= (column < C)[None, :]
    at = pool.at[slots.block_id[:, None], slots.offset[:, None], head, column[None, :]]
    stored = pltriton.load(at, mask=mask, other=0)
    if rule.kv_dtype in float8.FORMATS:
        return float8.decode(stored, rule.kv_dtype, dtype)
    return stored.astype(dtype)


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
