"""Attention of ragged queries over paged keys and values, as one GPU kernel.

Owns how queries are grouped. An item is a few neighbouring queries of one row of the batch, all
heads of a group together; a program takes one item and one KV head, and reads the row's keys from
the first one any of its queries sees to the last.

A query's result has the same bits in any item and any batch, as long as the tiling is the same:
products have the item's full size however many queries it has, tiles of keys begin at position 0,
and no program takes a part of a context.
"""

import functools as ft
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import attention
from pallas_kernels.attention import Cache, Rule
from pallas_kernels.checks import AttentionShape, check_attention, check_query_start_loc
from pallas_kernels.gpus import current_gpu
from pallas_kernels.tiling import (
    PrefillTiling,
    check_prefill,
    power_of_two,
    prefill_tiling,
)


class _Items(NamedTuple):
    """Neighbouring queries of one row, at most as many as a tile takes."""

    row: Any  # i32[items], in the block table
    start: Any  # i32[items], index of the first query
    position: Any  # i32[items], of the first query; negative where the row has no context
    num: Any  # i32[items], 0 for items not needed


class _Inputs(NamedTuple):
    q: Any  # [T H C]
    cache: Cache
    items: _Items
    sinks: Any  # [H] or None


def paged_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    block_table: jax.Array,
    context_lens: jax.Array,
    query_start_loc: jax.Array,
    kv_dtype: str,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    tiling: PrefillTiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of T packed queries over the pages of their rows, [T H C] in q's dtype.

    The queries of row b are `query_start_loc[b]` to `query_start_loc[b + 1]`, the last of them at
    position `context_lens[b] - 1`; their own keys are in the pool already. Queries behind the last
    row, and those of rows of context 0, give zeros. Slots that no query sees may hold anything, NaN
    included, and so may table entries for positions that none sees.

    Args:
        q: [T H C] bfloat16, float16 or float32.
        k: [N S K C] as `checks.STORAGE` says for `kv_dtype`; H is a multiple of K.
        v: as k.
        block_table: int32 [B M].
        context_lens: int32 [B], the step's own tokens included.
        query_start_loc: int32 [B+1], from 0 up.
        kv_dtype: what the pools' numbers are, see `checks.STORAGE`.
        k_scale: None, float32 [], or float32 [N S K]: times this a stored number is the key's.
        v_scale: the same of values.
        scale: of scores.
        window: a query at position p sees the positions above `p - window` (None: all) up to p.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        sinks: [H], a score per head that takes part in the softmax and has no value.
        tiling: None chooses by device, type and head dim, and never by T or B.
        interpret: runs on a CPU, in XLA.

    Raises:
        ValueError: shapes, types or a tiling that do not fit.
    """
    shape = check_attention(
        q,
        k,
        v,
        block_table=block_table,
        context_lens=context_lens,
        kv_dtype=kv_dtype,
        k_scale=k_scale,
        v_scale=v_scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
    check_query_start_loc(query_start_loc, context_lens)
    if shape.T == 0:
        return q
    dtype = attention.product_dtype(q.dtype, kv_dtype)
    tiling = _fitting(tiling, shape, dtype.itemsize, k.dtype.itemsize)
    num_queries = tiling.tile_q // shape.G
    inputs = _Inputs(
        q=q,
        cache=attention.make_cache(k, v, k_scale, v_scale, block_table, kv_dtype),
        items=_cut(context_lens, query_start_loc, num_tokens=shape.T, size=num_queries),
        sinks=sinks,
    )
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        ft.partial(
            _kernel,
            rule=Rule(scale, window, soft_cap, kv_dtype),
            tiling=tiling,
            group=shape.G,
        ),
        grid=(inputs.items.row.shape[0], shape.K),
        in_specs=jax.tree.map(lambda _: whole, tuple(inputs)),
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltriton.CompilerParams(
            num_warps=tiling.num_warps, num_stages=tiling.num_stages
        ),
        interpret=interpret,
        name="paged_prefill",
    )(*inputs)


def _fitting(
    tiling: PrefillTiling | None, shape: AttentionShape, itemsize: int, kv_itemsize: int
) -> PrefillTiling:
    """The given tiling or the one for this GPU, checked."""
    gpu, width = current_gpu(), power_of_two(shape.C)
    if tiling is None:
        tiling = prefill_tiling(
            head_dim=shape.C, group=shape.G, itemsize=itemsize, kv_itemsize=kv_itemsize, gpu=gpu
        )
    check_prefill(tiling, width=width, group=shape.G, itemsize=itemsize, gpu=gpu)
    return tiling


def _cut(
    context_lens: jax.Array, query_start_loc: jax.Array, *, num_tokens: int, size: int
) -> _Items:
    """Cuts every row's queries into items of at most `size`.

    The queries behind the last row are those of one more row, without context: its items write
    their zeros.
    """
    last_row = context_lens.shape[0] - 1
    ends = jnp.append(query_start_loc[1:], jnp.int32(num_tokens))
    num_new = ends - query_start_loc
    before = jnp.append(context_lens, jnp.int32(0)) - num_new
    item_ends = jnp.cumsum(-(-num_new // size))

    num_items = min(num_tokens, (num_tokens + num_new.shape[0] * (size - 1)) // size)
    item = jnp.arange(num_items, dtype=jnp.int32)
    row = jnp.searchsorted(item_ends, item, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, last_row + 1)
    offset = (item - jnp.where(row > 0, item_ends[row - 1], 0)) * size
    return _Items(
        row=jnp.minimum(row, last_row),
        start=query_start_loc[row] + offset,
        position=before[row] + offset,
        num=jnp.clip(num_new[row] - offset, 0, size),
    )


def _kernel(
    q_ref,  # [T H C]
    cache: Cache,
    items: _Items,
    sinks_ref,  # [H] or None
    out_ref,  # [T H C]
    *,
    rule: Rule,
    tiling: PrefillTiling,
    group: int,
):
    """One item and one KV head: queries times heads of the group are the rows of the products."""
    item, head = pl.program_id(0), pl.program_id(1)
    row, start, position, num = (ref[item] for ref in items)
    first = attention.first_visible(position, rule)
    last = jnp.where(num > 0, position + num - 1, -1)

    index = lax.iota(jnp.int32, tiling.tile_q)
    query = lax.div(index, jnp.full_like(index, group))
    q_position = jnp.where(query < num, position + query, -1)
    q_head = head * group + index - query * group
    place = {"is_ours": query < num, "width": power_of_two(q_ref.shape[2])}
    at = (start + query, q_head)
    queries = attention.load_queries(q_ref, at, position=q_position, rule=rule, **place)

    def add_tile(tile: jax.Array, softmax: attention.Softmax) -> attention.Softmax:
        slots = attention.find_slots(
            cache, tile, row=row, first=first, last=last, tile_kv=tiling.tile_kv
        )
        return attention.add_tile(softmax, queries, slots, cache, head, rule)

    # One loop with one body, masks and all: a second one for the tiles that all queries see whole
    # would be rounded otherwise, and which tiles these are depends on the item.
    softmax = lax.fori_loop(
        first // tiling.tile_kv,
        (last + tiling.tile_kv) // tiling.tile_kv,
        add_tile,
        attention.empty_softmax(queries, cache),
    )
    sink = None
    if sinks_ref is not None:
        sink = pltriton.load(sinks_ref.at[q_head]).astype(jnp.float32)
    out = attention.finish(softmax, cache, sink, rule)
    attention.store_pieces(out_ref, at, out, **place)
