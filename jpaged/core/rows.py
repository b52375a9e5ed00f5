"""Rows: seat a sequence, give it blocks to grow, fork it, let it go.

Owns every change of block tables. Sharing is one operation: prefix hits, samples of one prompt,
release and preemption are changes of the table, and `retarget` moves the reference counts along.
Row lists are padded with the null row; whatever is written there is written back as it was.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jpaged.core.batch import KVCache
from jpaged.core.block_pool import num_free, publish, retarget, take_blocks
from jpaged.core.logits_rules import clear_rules
from jpaged.core.prefix_cache import hash_root, hash_tokens, match_prefix, prefix_block_hashes
from jpaged.core.sampling import SamplingState
from jpaged.core.state import NULL_ROW, BlockPool, EngineState, Rows
from jpaged.ops.kv_cache import NULL_BLOCK, copy_blocks
from jpaged.typing import Array, Bool, Int, UInt32


@struct.dataclass
class Admissions:
    """A sequences to seat, padded with the null row. P here is a bucket of the prompt lengths."""

    row_ids: Int[Array, " A"]
    token_ids: Int[Array, "A P"]
    num_tokens: Int[Array, " A"]
    prompt_len: Int[Array, " A"]  # below num_tokens when a preempted sequence comes back
    request_root: UInt32[Array, "A 4"]
    sample_index: Int[Array, " A"]
    adapter_id: Int[Array, " A"]
    most_cached: Int[Array, " A"]  # tokens that the prefix cache may give; 0: none are read
    sampling: SamplingState  # one entry per admission, without rules


def match_admissions(
    state: EngineState, admissions: Admissions, *, window: int | None = None
) -> tuple[Int[Array, " A"], Int[Array, " A"]]:
    """What the prefix cache holds for these sequences, changing nothing.

    Returns for each the cached tokens, and how many of their blocks are free and would be taken
    out of the free blocks by admitting it: blocks behind the window would not.
    """
    S = state.rows.block_size
    ids, num_hits, _, _ = _match(state, admissions)
    column = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    is_kept = (ids != NULL_BLOCK) & (column >= _num_behind(num_hits * S, window, S)[:, None])
    is_free = is_kept & (state.pool.ref_count[ids] == 0)
    return num_hits * S, jnp.sum(is_free, axis=1, dtype=jnp.int32)


def admit(
    state: EngineState, admissions: Admissions, *, window: int | None = None
) -> tuple[EngineState, Int[Array, " A"]]:
    """Seats sequences in empty rows; each shares the blocks of its longest cached prefix.

    At least one token is left to run, since logits must come from somewhere, and whole blocks are
    shared or none. `window` (static) is the model's, see `leave_window`. Returns the state and the
    number of cached tokens of each sequence.
    """
    S = state.rows.block_size
    ids, num_hits, running, root = _match(state, admissions)
    at = admissions.row_ids
    table = jnp.zeros((at.shape[0], state.rows.block_table.shape[1]), jnp.int32)
    table = table.at[:, : ids.shape[1]].set(ids)
    pool = retarget(state.pool, state.rows.block_table[at], table)

    num_cached = num_hits * S
    prefix_hash = jnp.take_along_axis(running, num_hits[:, None, None], axis=1)[:, 0]
    rows = _set_rows(
        state.rows,
        at,
        token_ids=_pad_tokens(admissions.token_ids, state.rows.token_ids.shape[1]),
        num_tokens=admissions.num_tokens,
        context_len=num_cached,
        prompt_len=admissions.prompt_len,
        block_table=table,
        num_blocks=num_hits,
        root=root,
        prefix_hash=prefix_hash,
        sample_index=admissions.sample_index,
        adapter_id=admissions.adapter_id,
        active=jnp.ones_like(at, bool),
    )
    state = replace(
        state, rows=rows, pool=pool, sampling=_seat_sampling(state.sampling, admissions)
    )
    # Hits behind the window are let go again, but were used: the cache keeps the prefix together.
    return leave_window(state, at, window=window), num_cached


def _seat_sampling(sampling: SamplingState, admissions: Admissions) -> SamplingState:
    """New parameters, and no rules: these are set by `set_rules` for the few rows that have any."""
    at, rules = admissions.row_ids, sampling.rules
    sampling = jax.tree.map(
        lambda x, new: x.at[at].set(new), replace(sampling, rules=None), admissions.sampling
    )
    return replace(sampling, rules=None if rules is None else clear_rules(rules, at))


def _match(state: EngineState, admissions: Admissions):
    """Cached block ids [A M'], their number, the running hashes by block, and the rows' roots."""
    S, (A, P) = state.rows.block_size, admissions.token_ids.shape
    positions = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), (A, P))
    token_hash = hash_tokens(state.hash_key, admissions.token_ids, positions)
    root = hash_root(state.hash_key, admissions.request_root, state.weights_version)
    block_hashes, running = prefix_block_hashes(token_hash, root, block_size=S)
    most = jnp.minimum(admissions.num_tokens - 1, admissions.most_cached)
    num_full = jnp.where(admissions.row_ids != NULL_ROW, jnp.maximum(most, 0) // S, 0)
    ids, num_hits = match_prefix(state.pool, block_hashes, num_full)
    return ids, num_hits, running, root


def _pad_tokens(token_ids: Int[Array, "A W"], width: int) -> Int[Array, "A P"]:
    return jnp.pad(token_ids, ((0, 0), (0, width - token_ids.shape[1])))


def _set_rows(rows: Rows, row_ids: Int[Array, " A"], **fields: Array) -> Rows:
    """Writes the named fields of some rows; the null row keeps what it has."""
    target = jnp.where(row_ids == NULL_ROW, rows.num_tokens.shape[0], row_ids)
    new = {
        name: getattr(rows, name).at[target].set(value, mode="drop")
        for name, value in fields.items()
    }
    return replace(rows, **new)


class _Needs(NamedTuple):
    """Blocks that rows ask for before they can write: growth and copies of shared tails."""

    grow: Int[Array, " B"]
    is_copy: Bool[Array, " B"]
    tail: Int[Array, " B"]  # the partly filled block each row would write into; 0: none


def reserve(
    state: EngineState, row_ids: Int[Array, " B"], num_new: Int[Array, " B"], *, max_new: int
) -> tuple[EngineState, Int[Array, " B"]]:
    """Gives rows the blocks to write `num_new` more tokens after their context.

    Counted together per row: blocks to grow into, and a private copy of a shared block that is
    about to be written. All or nothing per row, in order, while free blocks last; rows that need
    none are always granted. `max_new` bounds the sum of `num_new` over all rows (static).
    Returns the state and granted[B]: `num_new`, or 0 for rows that did not fit.
    """
    S, B = state.rows.block_size, row_ids.shape[0]
    num_new = jnp.where(row_ids == NULL_ROW, 0, num_new)
    needs, is_keeper = _count_needs(state, row_ids, num_new)
    wanted = needs.grow + needs.is_copy.astype(jnp.int32)
    width = min(max_new // S + 2 * B, state.pool.ref_count.shape[0])
    available = jnp.minimum(num_free(state.pool), width)
    fits = jnp.cumsum(wanted, dtype=jnp.int32) <= available
    # The keeper of a shared block writes in place, so all other holders must have left it.
    granted = fits | ((wanted == 0) & ~is_keeper)
    wanted = jnp.where(granted, wanted, 0)

    pool, ids = take_blocks(state.pool, jnp.sum(wanted, dtype=jnp.int32), width=width)
    # A block written again no longer holds what its hash says.
    rewritten = granted & (num_new > 0) & ~needs.is_copy
    pool = publish(
        pool, jnp.where(rewritten, needs.tail, NULL_BLOCK), jnp.zeros((B, 4), jnp.uint32)
    )
    rows, pool, copies = _hand_out(state.rows, pool, row_ids, needs, wanted, ids)
    kv = lax.cond(
        jnp.any(copies[1] != NULL_BLOCK), _copy_layers, lambda kv, *_: kv, state.kv, *copies
    )
    return replace(state, rows=rows, pool=pool, kv=kv), jnp.where(granted, num_new, 0)


def blocks_needed(
    rows: Rows, row_ids: Int[Array, " B"], num_new: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Blocks each row lacks before it can write `num_new` more tokens.

    |-- context_len --|-- num_new --|
    [ block ][ block ][ block ][ . . ]     num_blocks = 3, one more is needed
    """
    end = rows.context_len[row_ids] + num_new
    return jnp.where(
        num_new > 0, jnp.maximum(-(-end // rows.block_size) - rows.num_blocks[row_ids], 0), 0
    )


def _count_needs(
    state: EngineState, row_ids: Int[Array, " B"], num_new: Int[Array, " B"]
) -> tuple[_Needs, Bool[Array, " B"]]:
    """Each row's needs, and which rows may keep a shared block because all its holders are here."""
    rows, pool = state.rows, state.pool
    context_len, S = rows.context_len[row_ids], rows.block_size
    column = jnp.minimum(context_len // S, rows.block_table.shape[1] - 1)
    in_block = (context_len % S != 0) & (num_new > 0)
    tail = jnp.where(in_block, rows.block_table[row_ids, column], NULL_BLOCK)
    is_shared = (tail != NULL_BLOCK) & (pool.ref_count[tail] > 1)

    index = jnp.arange(tail.shape[0], dtype=jnp.int32)
    writers = jnp.zeros_like(pool.ref_count).at[tail].add(1)
    last_writer = jnp.zeros_like(pool.ref_count).at[tail].max(index)
    is_keeper = is_shared & (writers[tail] == pool.ref_count[tail]) & (last_writer[tail] == index)
    grow = blocks_needed(rows, row_ids, num_new)
    return _Needs(grow, is_shared & ~is_keeper, tail), is_keeper


def _hand_out(rows, pool, row_ids, needs: _Needs, wanted: Int[Array, " B"], ids: Int[Array, " W"]):
    """Writes taken blocks into the tables: a row's copy first, then its growth.

    Returns rows, pool and (source, target)[B] of the copies to make; the null block twice: none.
    """
    B, W, M = row_ids.shape[0], ids.shape[0], rows.block_table.shape[1]
    start = jnp.cumsum(wanted, dtype=jnp.int32) - wanted
    item = jnp.arange(W, dtype=jnp.int32)
    owner = jnp.searchsorted(start + wanted, item, side="right").astype(jnp.int32)
    owner = jnp.minimum(owner, B - 1)
    offset = item - start[owner]
    is_copy = needs.is_copy[owner] & (offset == 0)
    tail_column = rows.context_len[row_ids] // rows.block_size
    column = rows.num_blocks[row_ids][owner] + offset - needs.is_copy[owner].astype(jnp.int32)
    column = jnp.where(is_copy, tail_column[owner], column)
    column = jnp.where(ids == NULL_BLOCK, M, column)  # past the end: dropped

    table = rows.block_table.at[row_ids[owner], column].set(ids, mode="drop")
    left = jnp.where(is_copy & (ids != NULL_BLOCK), needs.tail[owner], NULL_BLOCK)
    pool = retarget(pool, left[:, None], ids[:, None])
    copied = needs.is_copy & (wanted > 0)
    num_blocks = rows.num_blocks.at[row_ids].add(wanted - copied.astype(jnp.int32))
    target = jnp.where(copied, ids[jnp.minimum(start, W - 1)], NULL_BLOCK)
    source = jnp.where(copied, needs.tail, NULL_BLOCK)
    return replace(rows, block_table=table, num_blocks=num_blocks), pool, (source, target)


def _copy_layers(kv: KVCache, source: Int[Array, " B"], target: Int[Array, " B"]) -> KVCache:
    return tuple(copy_blocks(layer, source, target) for layer in kv)


def fork(
    state: EngineState,
    parent: Int[Array, " A"],
    child: Int[Array, " A"],
    sample_index: Int[Array, " A"],
) -> EngineState:
    """Makes rows `child` copies of rows `parent` that share every block holding KV.

    Nothing is copied but the table; the first write into a shared block copies it. Blocks the
    parent has reserved beyond its context stay its own. A child may be any inactive row, or hold
    blocks of its own, which it lets go. Pairs are padded with the null row on both sides.
    """
    rows, pool = share_rows(state.rows, state.pool, parent, child)
    rows = _set_rows(rows, child, sample_index=sample_index)
    sampling = jax.tree.map(lambda x: x.at[child].set(x[parent]), state.sampling)
    return replace(state, rows=rows, pool=pool, sampling=sampling)


def share_rows(
    rows: Rows, pool: BlockPool, parent: Int[Array, " A"], child: Int[Array, " A"]
) -> tuple[Rows, BlockPool]:
    """`fork` without what rows sample by. All at once: a child may be another's parent, and gives
    what it had before. A row whose parent is the null row is emptied."""
    num_blocks = -(-rows.context_len[parent] // rows.block_size)
    column = jnp.arange(rows.block_table.shape[1], dtype=jnp.int32)[None]
    table = jnp.where(column < num_blocks[:, None], rows.block_table[parent], NULL_BLOCK)
    pool = retarget(pool, rows.block_table[child], table)
    same = (
        "token_ids",
        "num_tokens",
        "context_len",
        "prompt_len",
        "root",
        "prefix_hash",
        "sample_index",
        "adapter_id",
        "active",
    )
    taken = {name: getattr(rows, name)[parent] for name in same}
    return _set_rows(rows, child, block_table=table, num_blocks=num_blocks, **taken), pool


def leave_window(
    state: EngineState, row_ids: Int[Array, " B"], *, window: int | None
) -> EngineState:
    """Lets go of blocks that no query of these rows will see again; full ones stay cached.

    The next query stands at `context_len` and sees `window` positions, its own included (static;
    None: all, and nothing is done). Columns before them name the null block from then on:

        context_len 13, window 6, S 4    [ null ][ null ][ 8..11 ][ 12.. ]    num_blocks = 4
    """
    if window is None:
        return state
    rows = state.rows
    num_behind = _num_behind(rows.context_len[row_ids], window, rows.block_size)
    old = rows.block_table[row_ids]
    column = jnp.arange(old.shape[1], dtype=jnp.int32)[None]
    new = jnp.where(column < num_behind[:, None], NULL_BLOCK, old)
    pool = retarget(state.pool, old, new)
    return replace(state, rows=_set_rows(rows, row_ids, block_table=new), pool=pool)


def _num_behind(
    context_len: Int[Array, " B"], window: int | None, block_size: int
) -> Int[Array, " B"]:
    """Full blocks of each context that its next query does not see."""
    if window is None:
        return jnp.zeros_like(context_len)
    return jnp.maximum(context_len - window + 1, 0) // block_size


def release(state: EngineState, row_ids: Int[Array, " A"]) -> EngineState:
    """Empties rows. Their full blocks stay cached until the pool needs them."""
    rows = state.rows
    table = rows.block_table[row_ids]
    pool = retarget(state.pool, table, jnp.zeros_like(table))
    zeros = jnp.zeros_like(row_ids)
    rows = _set_rows(
        rows,
        row_ids,
        block_table=jnp.zeros_like(table),
        num_blocks=zeros,
        num_tokens=zeros,
        context_len=zeros,
        active=zeros.astype(bool),
    )
    return replace(state, rows=rows, pool=pool)


def release_all(state: EngineState) -> EngineState:
    """Empties every row, in row order."""
    return release(state, jnp.arange(state.rows.num_tokens.shape[0], dtype=jnp.int32))
