"""Attention of a step's queries over paged keys and values.

Owns the contract `paged_attention`, its XLA form and the choice between that, the one in C++
(`jpaged.native`) and the one in kernels for GPUs (`kernel_attention`). Knows nothing of batches,
rows' requests or models; how pages are stored is `kv_cache`'s business.

Two paths, split by the static `num_decode_rows`. Decoding rows go together, one query each; the
other rows are cut into tiles of queries that each belong to one row. Both reduce over the context
in tiles of keys with an online softmax, in a loop whose length is a value and not a shape: one
compiled program serves every context, and its work follows the contexts actually there.
"""

import functools as ft
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.native import attention as native
from jpaged.ops import kernel_attention
from jpaged.ops.kv_cache import LayerKV, read_blocks
from jpaged.typing import Array, Bool, Float, Int

TILE_KV = 128  # keys a tile aims at; a tile is a whole number of blocks
TILE_Q = 32  # queries of one row that share their tiles of keys
ROW_QUANTUM = 8  # deterministic products have the group's size, rounded up to this, as their rows
MASKED = -1e30  # finite: the difference of two masked scores is 0, not NaN


class _Rule(NamedTuple):
    """Who sees what, and how scores are shaped. Static but for the sinks."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Float[Array, " H"] | None
    fixed_rows: int | None  # rows of every product; None: as they come


class _Queries(NamedTuple):
    """Queries grouped by row: those of one group share the group's keys.

    `tile_q` counts queries times G, since all heads of a group share one KV head.
    """

    q: Float[Array, "B K tile_q C"]
    positions: Int[Array, "B tile_q"]  # -1: sees nothing, and gives zeros
    first: Int[Array, " B"]  # the lowest position any query of the group sees
    last: Int[Array, " B"]  # the highest; -1 where the group has no query
    block_table: Int[Array, "B M"]


class _Softmax(NamedTuple):
    """The online softmax: sums of weights and weighted values, relative to the peak score."""

    peak: Float[Array, "B K tile_q"]
    total: Float[Array, "B K tile_q"]
    value: Float[Array, "B K tile_q C"]


def paged_attention(
    q: Float[Array, "T H C"],
    kv: LayerKV,
    *,
    block_table: Int[Array, "B M"],
    context_lens: Int[Array, " B"],
    query_start_loc: Int[Array, " B+1"],
    num_decode_rows: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None = None,
    deterministic: bool = False,
    implementation: str = "xla",
) -> Float[Array, "T H C"]:
    """Causal attention of T packed queries over the pages of their rows, in q's dtype.

    The first `num_decode_rows` rows own one query each, at index b; the queries of the other rows
    follow, ragged, as `query_start_loc` says; padding comes last and gives zeros. The last query of
    row b has position `context_lens[b] - 1`, and the step's own keys and values are already in the
    pool. A row of context 0 gives zeros. Slots that no query sees may hold anything, NaN included.

    Args:
        window: a query at position p sees the positions above `p - window` (None: all) up to p.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        sinks: a logit per head that takes part in the softmax and has no value.
        deterministic: a query's result has the same bits in any batch, decoded or prefilled.
        implementation: "xla"; "native" on a CPU, once `jpaged.native.library.load` has been called,
            whose results always have the same bits in any batch, and which leaves pools of 8 bits
            to XLA; or "pallas", which is interpreted on a CPU.
    """
    if implementation == "pallas":
        return kernel_attention.attend(
            q,
            kv,
            block_table=block_table,
            context_lens=context_lens,
            query_start_loc=query_start_loc,
            num_decode_rows=num_decode_rows,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
            deterministic=deterministic,
        )
    if implementation == "native" and not kv.is_quantized:
        return native.attend(
            q,
            kv.k,
            kv.v,
            kv_dtype=kv.dtype,
            block_table=block_table,
            context_lens=context_lens,
            query_start_loc=query_start_loc,
            num_decode_rows=num_decode_rows,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
        )
    group = q.shape[1] // kv.k.shape[2]
    fixed_rows = -(-group // ROW_QUANTUM) * ROW_QUANTUM if deterministic else None
    rule = _Rule(scale, window, soft_cap, sinks, fixed_rows)
    block_table = _whole_tiles(block_table, block_size=kv.k.shape[1])
    decoded = _attend_decode(
        q[:num_decode_rows],
        kv,
        block_table[:num_decode_rows],
        context_lens[:num_decode_rows],
        rule,
    )
    prefilled = _attend_prefill(
        q[num_decode_rows:],
        kv,
        block_table[num_decode_rows:],
        context_lens[num_decode_rows:],
        query_start_loc[num_decode_rows:] - num_decode_rows,
        rule,
    )
    return jnp.concatenate([decoded, prefilled])


def _attend_decode(
    q: Float[Array, "B H C"],
    kv: LayerKV,
    block_table: Int[Array, "B M"],
    context_lens: Int[Array, " B"],
    rule: _Rule,
) -> Float[Array, "B H C"]:
    """One query per row, all rows side by side, as far as the longest context goes."""
    B, H, C = q.shape
    if B == 0:
        return q
    K = kv.k.shape[2]
    last = context_lens - 1
    queries = _Queries(
        q=q.reshape(B, K, H // K, C),
        positions=last[:, None],
        first=_first_visible(last, rule),
        last=last,
        block_table=block_table,
    )
    return _attend(queries, kv, rule).reshape(B, H, C)


def _attend_prefill(
    q: Float[Array, "T H C"],
    kv: LayerKV,
    block_table: Int[Array, "B M"],
    context_lens: Int[Array, " B"],
    query_start_loc: Int[Array, " B+1"],
    rule: _Rule,
) -> Float[Array, "T H C"]:
    """Tiles of queries, one after the other; each loops over its own row's keys."""
    T = q.shape[0]
    if T == 0 or block_table.shape[0] == 0:
        return jnp.zeros_like(q)
    tiles, num_tiles = _query_tiles(context_lens, query_start_loc, num_tokens=T)
    # A tile's queries are neighbours: slices instead of gathers. The last slice needs room.
    q = jnp.pad(q, ((0, TILE_Q), (0, 0), (0, 0)))

    def attend_tile(i: Int[Array, ""], out: Float[Array, "T H C"]) -> Float[Array, "T H C"]:
        tile = jax.tree.map(lambda x: x[i], tiles)
        q_tile = lax.dynamic_slice_in_dim(q, tile.start, TILE_Q)
        result = _attend_tile(q_tile, tile, kv, block_table, rule)
        # Past its row's end a tile writes zeros over the next tile's queries, which come later.
        return lax.dynamic_update_slice_in_dim(out, result, tile.start, 0)

    return lax.fori_loop(0, num_tiles, attend_tile, jnp.zeros_like(q))[:T]


class _Tile(NamedTuple):
    """Neighbouring queries of one row."""

    row: Int[Array, "*tiles"]
    start: Int[Array, "*tiles"]  # index of the first query
    position: Int[Array, "*tiles"]  # position of the first query
    num: Int[Array, "*tiles"]  # queries in use, at most TILE_Q


def _query_tiles(
    context_lens: Int[Array, " B"], query_start_loc: Int[Array, " B+1"], *, num_tokens: int
) -> tuple[_Tile, Int[Array, ""]]:
    """Cuts every row's queries into tiles, packed in row order, and counts those in use."""
    B = context_lens.shape[0]
    num_new = jnp.diff(query_start_loc)
    ends = jnp.cumsum(-(-num_new // TILE_Q))
    tile = jnp.arange((num_tokens + B * (TILE_Q - 1)) // TILE_Q, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, tile, side="right").astype(jnp.int32), B - 1)
    within_row = tile - jnp.where(row > 0, ends[row - 1], 0)
    offset = within_row * TILE_Q
    tiles = _Tile(
        row=row,
        start=query_start_loc[row] + offset,
        position=context_lens[row] - num_new[row] + offset,
        num=jnp.minimum(num_new[row] - offset, TILE_Q),
    )
    return tiles, ends[-1]


def _attend_tile(
    q: Float[Array, "tile H C"],
    tile: _Tile,
    kv: LayerKV,
    block_table: Int[Array, "B M"],
    rule: _Rule,
) -> Float[Array, "tile H C"]:
    _, H, C = q.shape
    K = kv.k.shape[2]
    G = H // K
    index = jnp.arange(TILE_Q, dtype=jnp.int32)
    positions = jnp.where(index < tile.num, tile.position + index, -1)
    queries = _Queries(
        q=q.reshape(TILE_Q, K, G, C).swapaxes(0, 1).reshape(1, K, TILE_Q * G, C),
        positions=jnp.repeat(positions, G)[None],
        first=_first_visible(tile.position, rule)[None],
        last=(tile.position + tile.num - 1)[None],
        block_table=block_table[tile.row][None],
    )
    out = _attend(queries, kv, rule)
    return out.reshape(K, TILE_Q, G, C).swapaxes(0, 1).reshape(TILE_Q, H, C)


def _attend(queries: _Queries, kv: LayerKV, rule: _Rule) -> Float[Array, "B K tile_q C"]:
    """Loops over the tiles of keys that any group needs: tile t holds the same positions always."""
    tile_kv = _blocks_per_tile(kv.k.shape[1]) * kv.k.shape[1]
    end = jnp.max(queries.last) // tile_kv + 1
    begin = jnp.min(jnp.where(queries.last >= 0, queries.first // tile_kv, end))
    body = ft.partial(_add_tile, queries=queries, kv=kv, rule=rule)
    softmax = lax.fori_loop(begin, end, body, _empty_softmax(queries.q))
    return _finish(softmax, rule.sinks).astype(queries.q.dtype)


def _add_tile(
    t: Int[Array, ""], softmax: _Softmax, *, queries: _Queries, kv: LayerKV, rule: _Rule
) -> _Softmax:
    """Takes the keys and values of tile t into the softmax."""
    k, v = (x.astype(queries.q.dtype) for x in _read_tile(t, kv, queries.block_table))
    positions = t * k.shape[2] + jnp.arange(k.shape[2], dtype=jnp.int32)
    # 0 * NaN is NaN: values nobody sees are zeroed, not only weighted with 0.
    first, last = queries.first[:, None], queries.last[:, None]
    is_live = (positions[None] >= first) & (positions[None] <= last)
    v = jnp.where(is_live[:, None, :, None], v, 0)
    is_visible = _visible(queries.positions, positions, rule)[:, None]
    scores = jnp.where(is_visible, _scores(queries.q, k, rule), MASKED)
    peak = jnp.maximum(softmax.peak, jnp.max(scores, axis=-1))
    weights = jnp.where(is_visible, jnp.exp(scores - peak[..., None]), 0)
    decay = jnp.exp(softmax.peak - peak)
    return _Softmax(
        peak=peak,
        total=softmax.total * decay + _sum_weights(weights, rule),
        value=softmax.value * decay[..., None]
        + _product(weights.astype(v.dtype), v, rule, contract=2),
    )


def _read_tile(
    t: Int[Array, ""], kv: LayerKV, block_table: Int[Array, "B M"]
) -> tuple[Float[Array, "B K tile_kv C"], Float[Array, "B K tile_kv C"]]:
    """Keys and values of tile t of every group, head by head, as batched products like them."""
    _, S, K, C = kv.k.shape
    B = block_table.shape[0]
    width = _blocks_per_tile(S)
    block_ids = lax.dynamic_slice_in_dim(block_table, t * width, width, axis=1)
    k, v = read_blocks(kv, block_ids)
    k, v = (x.reshape(B, width * S, K, C).swapaxes(1, 2) for x in (k, v))
    return k, v


def _visible(
    q_positions: Int[Array, "B tile_q"], kv_positions: Int[Array, " tile_kv"], rule: _Rule
) -> Bool[Array, "B tile_q tile_kv"]:
    q_positions, kv_positions = q_positions[:, :, None], kv_positions[None, None]
    is_visible = kv_positions <= q_positions
    if rule.window is None:
        return is_visible
    return is_visible & (kv_positions > q_positions - rule.window)


def _first_visible(position: Int[Array, "..."], rule: _Rule) -> Int[Array, "..."]:
    if rule.window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - rule.window + 1, 0)


def _scores(
    q: Float[Array, "B K tile_q C"], k: Float[Array, "B K tile_kv C"], rule: _Rule
) -> Float[Array, "B K tile_q tile_kv"]:
    scores = _product(q, k, rule, contract=3) * rule.scale
    if rule.soft_cap is None:
        return scores
    return rule.soft_cap * jnp.tanh(scores / rule.soft_cap)


def _product(
    x: Float[Array, "B K _ _"], y: Float[Array, "B K _ _"], rule: _Rule, *, contract: int
) -> Float[Array, "B K _ _"]:
    """A product per group and KV head, over the last axis of x.

    What sum a product takes, in which order, depends on how many rows it has. Deterministic mode
    cuts x into pieces of one size, be it one decoded query or a tile of them.
    """
    if rule.fixed_rows is None:
        return _batched_dot(x, y, contract=contract)
    rows = x.shape[2]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -rows % rule.fixed_rows), (0, 0)))
    pieces = jnp.split(x, x.shape[2] // rule.fixed_rows, axis=2)
    products = [_batched_dot(piece, y, contract=contract) for piece in pieces]
    return jnp.concatenate(products, axis=2)[:, :, :rows]


def _sum_weights(
    weights: Float[Array, "B K tile_q tile_kv"], rule: _Rule
) -> Float[Array, "B K tile_q"]:
    """Of each query. In deterministic mode it is a product with ones, not a sum, which is fused
    with the exponentials before it and had other bits in some shapes (jax 0.10.2 on AVX2).
    """
    if rule.fixed_rows is None:
        return jnp.sum(weights, axis=-1)
    B, K, _, tile_kv = weights.shape
    ones = jnp.ones((B, K, tile_kv, 1), weights.dtype)
    return _product(weights, ones, rule, contract=2)[..., 0]


def _batched_dot(
    x: Float[Array, "B K _ _"], y: Float[Array, "B K _ _"], *, contract: int
) -> Float[Array, "B K _ _"]:
    """A product per row and KV head, over the last axis of x, accumulated in float32."""
    return lax.dot_general(
        x,
        y,
        (((3,), (contract,)), ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _empty_softmax(q: Float[Array, "B K tile_q C"]) -> _Softmax:
    return _Softmax(
        peak=jnp.full(q.shape[:3], MASKED, jnp.float32),
        total=jnp.zeros(q.shape[:3], jnp.float32),
        value=jnp.zeros(q.shape, jnp.float32),
    )


def _finish(softmax: _Softmax, sinks: Float[Array, " H"] | None) -> Float[Array, "B K tile_q C"]:
    """Divides by the sum of weights, the sink's included; no weight at all gives zeros."""
    value, total = softmax.value, softmax.total
    if sinks is not None:
        _, K, tile_q = total.shape
        sink = jnp.tile(sinks.astype(jnp.float32).reshape(K, -1), (1, tile_q * K // sinks.shape[0]))
        sink = sink[None]
        peak = jnp.maximum(softmax.peak, sink)
        decay = jnp.exp(softmax.peak - peak)
        value, total = value * decay[..., None], total * decay + jnp.exp(sink - peak)
    return jnp.where(total > 0, 1 / total, 0)[..., None] * value


def _blocks_per_tile(block_size: int) -> int:
    return max(1, TILE_KV // block_size)


def _whole_tiles(block_table: Int[Array, "B M"], *, block_size: int) -> Int[Array, "B padded_M"]:
    """Pads the table with the null block to a whole number of tiles."""
    return jnp.pad(block_table, ((0, 0), (0, -block_table.shape[1] % _blocks_per_tile(block_size))))
