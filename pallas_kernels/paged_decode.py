"""Attention of one query per row over paged keys and values, for NVIDIA GPUs.

Owns the split of a row's context among programs and the merge of what they find. What a program
does with a tile of keys is `attention`'s business.

    context of a row    [ tile | tile | tile | tile | tile | tile | til ]
    a window sees                     |<-------------------------->|
    3 splits                   [  split 0  |  split 1   | split 2 ]

What is visible is divided, not the context: all splits have work however far back the row began.
"""

import functools as ft
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import attention
from pallas_kernels import tiling as tilings
from pallas_kernels.attention import LOG2_E, LOWEST, Cache, Rule
from pallas_kernels.checks import STORAGE, AttentionShape, check_attention
from pallas_kernels.gpus import current_gpu
from pallas_kernels.tiling import DecodeTiling


class _Work(NamedTuple):
    """What one program does. Static."""

    shape: AttentionShape
    rule: Rule
    tiling: DecodeTiling
    rows: int  # query heads of a group that go together, padded
    width: int  # the head dim, padded


def paged_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    block_table: jax.Array,
    context_lens: jax.Array,
    kv_dtype: str,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    tiling: DecodeTiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of B queries, one per row, to the pages of their rows.

    The query of row b has position `context_lens[b] - 1`; its own key and value are in the pool.
    A row of context 0 gives zeros. Slots that no query sees may hold anything, NaN included, and
    so may the entries of the block table beyond a row's context: neither is read.

    The partial results of splits are merged as Flash-Decoding does it (Dao et al., 2023), each
    weighted with the logarithm of its sum of weights.

    Args:
        q: [B H C] bfloat16, float16 or float32.
        k: [N S K C] keys, stored as `checks.STORAGE` has it for `kv_dtype`.
        v: [N S K C] values, likewise.
        block_table: int32 [B M].
        context_lens: int32 [B], no longer than the table's M * S.
        kv_dtype: the type of the cache's numbers: bfloat16, float16, float32, int8,
            float8_e4m3fn or float8_e5m2.
        k_scale: what a stored key is multiplied by: float32 [] or [N S K]; None: 1.
        v_scale: the same for values.
        scale: of the scores.
        window: the query sees this many positions, its own included; None: all.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        sinks: [H], a score per head that takes part in the softmax and has no value.
        tiling: None: chosen by `tiling.decode_tiling`.
        interpret: run on a CPU, operation by operation.

    Returns:
        [B H C] in q's type.

    Raises:
        ValueError: arguments that do not go together, or a tiling that does not fit the GPU.
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
    if shape.T != shape.B:
        raise ValueError(f"{shape.T} queries for {shape.B} rows; decoding takes one for each")
    if shape.B == 0:
        return q
    work = _plan(shape, Rule(scale, window, soft_cap, kv_dtype), q.dtype, tiling)
    cache = attention.make_cache(k, v, k_scale, v_scale, block_table, kv_dtype)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
    if work.tiling.num_splits == 1:
        out = jax.ShapeDtypeStruct(q.shape, q.dtype)
        return _launch(work, out, q, context_lens, sinks, cache, interpret=interpret)
    partial_shape = (*q.shape[:2], work.tiling.num_splits)
    out = _Partials(
        value=jax.ShapeDtypeStruct((*partial_shape, shape.C), jnp.float32),
        log_total=jax.ShapeDtypeStruct(partial_shape, jnp.float32),
    )
    partials = _launch(work, out, q, context_lens, None, cache, interpret=interpret)
    return _merge(partials, sinks).astype(q.dtype)


class _Partials(NamedTuple):
    """What the splits of each row and head found."""

    value: Any  # f32[B H splits C], the mean of the split's values; undefined if it had no keys
    log_total: Any  # f32[B H splits], log2 of its sum of weights; LOWEST if it had no keys


def _plan(
    shape: AttentionShape, rule: Rule, q_dtype: jnp.dtype, tiling: DecodeTiling | None
) -> _Work:
    gpu = current_gpu()
    width = tilings.power_of_two(shape.C)
    itemsize = attention.product_dtype(q_dtype, rule.kv_dtype).itemsize
    rows = tilings.decode_rows(shape.G, width=width, itemsize=itemsize)
    kv_itemsize = jnp.dtype(STORAGE[rule.kv_dtype]).itemsize
    if tiling is None:
        context = shape.M * shape.S
        tiling = tilings.decode_tiling(
            num_programs=shape.B * shape.K * -(-shape.G // rows),
            max_visible=context if rule.window is None else min(context, rule.window),
            rows=rows,
            width=width,
            itemsize=itemsize,
            kv_itemsize=kv_itemsize,
            gpu=gpu,
        )
    tilings.check_decode(
        tiling,
        rows=rows,
        width=width,
        kv_itemsize=kv_itemsize,
        itemsize=itemsize,
        gpu=gpu,
    )
    return _Work(shape=shape, rule=rule, tiling=tiling, rows=rows, width=width)


def _launch(
    work: _Work,
    out_shape: Any,
    q: jax.Array,
    context_lens: jax.Array,
    sinks: jax.Array | None,
    cache: Cache,
    *,
    interpret: bool,
) -> Any:
    shape, tiling = work.shape, work.tiling
    group_tiles = -(-shape.G // work.rows)
    args = (q, context_lens, sinks, cache)
    return pl.pallas_call(
        ft.partial(_decode_kernel, work=work),
        grid=(shape.B, shape.K * group_tiles, tiling.num_splits),
        in_specs=_in_place(args),
        out_specs=_in_place(out_shape),
        out_shape=out_shape,
        compiler_params=pltriton.CompilerParams(
            num_warps=tiling.num_warps, num_stages=tiling.num_stages
        ),
        interpret=interpret,
        name="paged_decode",
    )(*args)


def _in_place(tree: Any) -> Any:
    """Specs of arrays that stay in device memory: other ones copy pools when interpreted."""
    return jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), tree)


def _decode_kernel(
    q_ref,  # [B H C]
    context_ref,  # i32[B]
    sinks_ref,  # None or f32[H]
    cache: Cache,  # refs
    out_ref,  # [B H C]; of more than one split f32[B H splits C], as in _Partials
    log_total_ref=None,  # of more than one split f32[B H splits]
    *,
    work: _Work,
):
    shape = work.shape
    row, split = pl.program_id(0), pl.program_id(2)
    group_tiles = -(-shape.G // work.rows)
    kv_head, group_tile = _div_rem(pl.program_id(1), group_tiles)
    member = group_tile * work.rows + lax.iota(jnp.int32, work.rows)
    head = kv_head * shape.G + member
    context_len = context_ref[row]
    begin, end = _tiles_of(split, context_len, work)

    def attend() -> attention.Softmax:
        return _attend(q_ref, cache, row, kv_head, head, context_len, begin, end, work)

    is_head = member < shape.G
    store = ft.partial(attention.store_pieces, out_ref, is_ours=is_head, width=work.width)
    if log_total_ref is None:
        sink = None
        if sinks_ref is not None:
            sink = pltriton.load(sinks_ref.at[head], mask=is_head, other=0)
        store((row, head), attention.finish(attend(), cache, sink, work.rule))
        return

    @pl.when(begin < end)
    def _():
        softmax = attend()
        store((row, head, split), attention.finish(softmax, cache, None, work.rule))
        log_total = softmax.peak + jnp.log2(softmax.total)
        pltriton.store(log_total_ref.at[row, head, split], log_total, mask=is_head)

    @pl.when(begin >= end)
    def _():
        nothing = jnp.full((work.rows,), LOWEST, jnp.float32)
        pltriton.store(log_total_ref.at[row, head, split], nothing, mask=is_head)


def _tiles_of(split: jax.Array, context_len: jax.Array, work: _Work) -> tuple[jax.Array, jax.Array]:
    """The tiles of keys, from and to, that a split of a row takes. Later splits may have none."""
    tile_kv, num_splits = work.tiling.tile_kv, work.tiling.num_splits
    first = attention.first_visible(context_len - 1, work.rule)
    row_begin, _ = _div_rem(first, tile_kv)
    row_end, _ = _div_rem(context_len + (tile_kv - 1), tile_kv)
    per_split, _ = _div_rem(row_end - row_begin + (num_splits - 1), num_splits)
    begin = row_begin + split * per_split
    return begin, jnp.minimum(begin + per_split, row_end)


def _attend(
    q_ref: Any,
    cache: Cache,
    row: jax.Array,
    kv_head: jax.Array,
    head: jax.Array,
    context_len: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    work: _Work,
) -> attention.Softmax:
    """The softmax of some heads of a group over the tiles from `begin` to `end`."""
    last = context_len - 1
    first = attention.first_visible(last, work.rule)
    queries = attention.load_queries(
        q_ref,
        (row, head),
        position=jnp.broadcast_to(last, head.shape),
        is_ours=head < (kv_head + 1) * work.shape.G,
        width=work.width,
        rule=work.rule,
    )

    def add(tile: jax.Array, softmax: attention.Softmax) -> attention.Softmax:
        slots = attention.find_slots(
            cache, tile, row=row, first=first, last=last, tile_kv=work.tiling.tile_kv
        )
        return attention.add_tile(softmax, queries, slots, cache, kv_head, work.rule)

    return lax.fori_loop(begin, end, add, attention.empty_softmax(queries, cache))


def _merge(partials: _Partials, sinks: jax.Array | None) -> jax.Array:
    """The attention of rows from that of their splits, f32[B H C]."""
    value, log_total = partials
    peak = jnp.max(log_total, axis=2)
    if sinks is not None:
        peak = jnp.maximum(peak, sinks[None, :] * LOG2_E)
    has_keys = log_total > LOWEST
    weight = jnp.where(has_keys, jnp.exp2(log_total - peak[:, :, None]), 0)
    total = jnp.sum(weight, axis=2)
    if sinks is not None:
        total += jnp.exp2(sinks[None, :] * LOG2_E - peak)
    value = jnp.sum(weight[..., None] * jnp.where(has_keys[..., None], value, 0), axis=2)
    return value * jnp.where(total > 0, 1 / total, 0)[..., None]


def _div_rem(x: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of an i32 that is not negative: `//` takes care of signs as well."""
    return lax.div(x, jnp.int32(divisor)), lax.rem(x, jnp.int32(divisor))
