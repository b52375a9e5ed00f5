"""Prefix caching: hash what a block holds, find blocks by hash, publish blocks that became full.

A token's hash is a keyed 128-bit value of (position, token): two threefry calls under halves of the
engine's `hash_key`. Along a prefix the token hashes are XORed, so any number of tokens is hashed in
parallel and a decode step extends the value by one XOR. The running value at a block's end, XORed
with the row's root, is that block's key: it names the whole prefix, not the block alone.
XOR is linear, hence hash values are safe only while unseen: they are never logged or exported.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry_2x32

from jpaged.core.batch import Batch
from jpaged.core.block_pool import is_hashed, publish
from jpaged.core.state import BlockPool, Rows
from jpaged.ops.kv_cache import NULL_BLOCK
from jpaged.typing import Array, Bool, Int, UInt32

_ROOT_POSITION = 0xFFFFFFFF  # no token has it: separates the root's hash from the tokens'


def hash_tokens(
    key: UInt32[Array, " 4"], token_ids: Int[Array, "*shape"], positions: Int[Array, "*shape"]
) -> UInt32[Array, "*shape 4"]:
    """Keyed hash of each (position, token) on its own."""
    return _hash_words(key, positions.astype(jnp.uint32), token_ids.astype(jnp.uint32))


def _hash_words(
    key: UInt32[Array, " 4"], high: UInt32[Array, "*shape"], low: UInt32[Array, "*shape"]
) -> UInt32[Array, "*shape 4"]:
    count = jnp.concatenate([high.reshape(-1), low.reshape(-1)])
    halves = [
        threefry_2x32((half[0], half[1]), count).reshape(2, -1) for half in (key[:2], key[2:])
    ]
    return jnp.concatenate(halves).T.reshape(*high.shape, 4)


def hash_root(
    key: UInt32[Array, " 4"],
    request_root: UInt32[Array, "A 4"],
    weights_version: UInt32[Array, ""],
) -> UInt32[Array, "A 4"]:
    """What a row's KV depends on besides its tokens: the request's own digest and the weights."""
    return request_root ^ _hash_words(key, jnp.uint32(_ROOT_POSITION), weights_version)[None]


def running_xor(hashes: UInt32[Array, "*shape 4"]) -> UInt32[Array, "*shape 4"]:
    """Prefix XOR along the last axis but one.

    Windows that reach back to the start, as in `cumsum`: XLA splits them, and they compile in a
    quarter of the time of an associative scan.
    """
    ones = (1,) * hashes.ndim
    length = hashes.shape[-2]
    window = (*ones[:-2], length, 1)
    padding = [(0, 0)] * (hashes.ndim - 2) + [(length - 1, 0), (0, 0)]
    return lax.reduce_window(hashes, np.uint32(0), lax.bitwise_xor, window, ones, padding)


def match_prefix(
    pool: BlockPool, hashes: UInt32[Array, "A M 4"], num_full: Int[Array, " A"]
) -> tuple[Int[Array, "A M"], Int[Array, " A"]]:
    """Cached blocks that hold the first blocks of A prefixes.

    num_full: how many of the hashes may be used. Returns ids[A, M], the null block past the hits,
    and the number of hits: the length of the unbroken run from the start.
    """
    ids = _find_blocks(pool, hashes)
    column = jnp.arange(hashes.shape[1], dtype=jnp.int32)[None]
    is_usable = (ids != NULL_BLOCK) & (column < num_full[:, None])
    hit = jnp.cumprod(is_usable, axis=1, dtype=jnp.int32)
    return jnp.where(hit == 1, ids, NULL_BLOCK), jnp.sum(hit, axis=1, dtype=jnp.int32)


def _find_blocks(pool: BlockPool, hashes: UInt32[Array, "A M 4"]) -> Int[Array, "A M"]:
    """For each hash the lowest block that has it, or the null block.

    The wanted hashes are sorted by their first 64 bits, and every block looks for itself among them
    by bisection: sorting all N blocks instead takes 25 ms for 65,536 on a CPU. The whole 128 bits
    are compared at the end, so that a clash is a miss.
    """
    N, (A, M) = pool.ref_count.shape[0], hashes.shape[:2]
    if M == 0:  # no prompt fills a block
        return jnp.zeros((A, 0), jnp.int32)
    words = hashes[..., 0].reshape(-1), hashes[..., 1].reshape(-1)
    sorted0, sorted1 = lax.sort(words, num_keys=2)
    block0, block1 = pool.block_hash[:, 0], pool.block_hash[:, 1]
    place = _lower_bound(sorted0, sorted1, block0, block1)
    at = jnp.minimum(place, A * M - 1)
    is_wanted = (sorted0[at] == block0) & (sorted1[at] == block1) & is_hashed(pool)
    target = jnp.where(is_wanted, place, A * M)
    all_ids = jnp.arange(N, dtype=jnp.int32)
    block_at = jnp.full(A * M, N, jnp.int32).at[target].min(all_ids, mode="drop")
    ids = block_at[_lower_bound(sorted0, sorted1, hashes[..., 0], hashes[..., 1])]
    ids = jnp.where(ids == N, NULL_BLOCK, ids)
    return jnp.where(jnp.all(pool.block_hash[ids] == hashes, axis=-1), ids, NULL_BLOCK)


def _lower_bound(
    word0: UInt32[Array, " W"],
    word1: UInt32[Array, " W"],
    query0: UInt32[Array, "*shape"],
    query1: UInt32[Array, "*shape"],
) -> Int[Array, "*shape"]:
    """First index whose (word0, word1) is not below the query: `searchsorted` on 64-bit keys."""
    W = word0.shape[0]

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        at0, at1 = word0[middle], word1[middle]
        below = (at0 < query0) | ((at0 == query0) & (at1 < query1))
        below &= low < high
        return jnp.where(below, middle + 1, low), jnp.where(below, high, middle)

    start = (jnp.zeros(query0.shape, jnp.int32), jnp.full(query0.shape, W, jnp.int32))
    return lax.fori_loop(0, W.bit_length(), halve, start)[0]


def prefix_block_hashes(
    token_hash: UInt32[Array, "A P 4"], root: UInt32[Array, "A 4"], *, block_size: int
) -> tuple[UInt32[Array, "A M 4"], UInt32[Array, "A M+1 4"]]:
    """Of A token lists the keys of the full blocks, and the running hashes after 0, 1, ... of them.

    Blocks are folded first: running over all tokens takes 8 times as long for 131,072 of them.
    """
    (A, P), S = token_hash.shape[:2], block_size
    in_blocks = token_hash[:, : P // S * S].reshape(A, P // S, S, 4)
    folded = lax.reduce(in_blocks, np.uint32(0), lax.bitwise_xor, (2,))
    running = running_xor(jnp.pad(folded, ((0, 0), (1, 0), (0, 0))))
    return running[:, 1:] ^ root[:, None], running


def seal_blocks(
    pool: BlockPool,
    rows: Rows,
    row_ids: Int[Array, " B"],
    batch: Batch,
    hash_key: UInt32[Array, " 4"],
    is_good: Bool[Array, " B"],
) -> tuple[BlockPool, Rows]:
    """Extends the rows' running hashes by this step's tokens and publishes blocks they filled.

    Rows that are not `is_good` (their numbers went wrong) publish nothing.
    """
    S = rows.block_size
    start, end = batch.query_start_loc[:-1], batch.query_start_loc[1:]
    is_token = batch.slot_mapping != 0  # slot 0 belongs to the null block
    token_hash = hash_tokens(hash_key, batch.token_ids, batch.positions)
    total = running_xor(jnp.where(is_token[:, None], token_hash, 0))
    total = jnp.concatenate([jnp.zeros((1, 4), jnp.uint32), total])
    before = rows.prefix_hash[row_ids] ^ total[start]

    running = before[batch.token_rows] ^ total[1:]
    is_full = is_token & (batch.positions % S == S - 1) & is_good[batch.token_rows]
    block_ids = jnp.where(is_full, batch.slot_mapping // S, NULL_BLOCK)
    pool = publish(pool, block_ids, running ^ rows.root[row_ids][batch.token_rows])
    prefix_hash = rows.prefix_hash.at[row_ids].set(before ^ total[end])
    return pool, replace(rows, prefix_hash=prefix_hash)
