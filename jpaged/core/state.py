"""The engine's state: rows, block pool, KV pages and sampling parameters, one immutable value.

Owns the types, their first value and `check_invariants`. Every change is made by the functions of
`block_pool`, `prefix_cache`, `rows` and `step`. Types are plain records: JAX rebuilds them around
shardings and shapes, so nothing is checked when they are made.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct

from jpaged.core.batch import KVCache
from jpaged.core.logits_rules import LogitsProcessor, RuleSizes
from jpaged.core.sampling import SamplingState, init_sampling_state
from jpaged.ops.kv_cache import NULL_BLOCK
from jpaged.typing import Array, Bool, Int, UInt32

NULL_ROW = 0


@struct.dataclass
class BlockPool:
    """Which KV blocks are held, free, or free and kept for reuse."""

    ref_count: Int[Array, " N"]  # block-table entries that point at the block; block 0 pinned at 1
    block_hash: UInt32[Array, "N 4"]  # key of the block's contents; zeros: none
    last_used: Int[Array, " N"]  # pool clock when the block was last freed; 0: never
    clock: Int[Array, ""]  # ticks once per freed block


@struct.dataclass
class Rows:
    """The resident sequences. Row 0 is the null row: never active, padding of row lists.

    A row knows `num_tokens` tokens and has KV for the first `context_len` of them. Prefill, chunks,
    prefix hits, decoding and resumption are all "let `context_len` catch up with `num_tokens`".
    """

    token_ids: Int[Array, "R P"]  # prompt, then generated tokens
    num_tokens: Int[Array, " R"]
    context_len: Int[Array, " R"]
    prompt_len: Int[Array, " R"]
    block_table: Int[Array, "R M"]  # block 0 past `num_blocks`, and for blocks behind a window
    num_blocks: Int[Array, " R"]  # columns of the table up to the last block
    root: UInt32[Array, "R 4"]  # what KV depends on besides tokens and positions
    prefix_hash: UInt32[Array, "R 4"]  # running hash of the first `context_len` tokens
    sample_index: Int[Array, " R"]  # which of a request's n samples
    adapter_id: Int[Array, " R"]
    active: Bool[Array, " R"]

    @property
    def block_size(self) -> int:
        """S, from the shapes."""
        return self.token_ids.shape[1] // self.block_table.shape[1]


@struct.dataclass
class EngineState:
    """Everything that changes on the device."""

    rows: Rows
    pool: BlockPool
    kv: KVCache
    sampling: SamplingState
    hash_key: UInt32[Array, " 4"]  # random per engine: block hashes are unpredictable
    weights_version: UInt32[Array, ""]  # part of every row's root: no stale KV after an update


def init_state(
    kv: KVCache,
    *,
    num_rows: int,
    max_blocks_per_row: int,
    hash_key: UInt32[Array, " 4"],
    num_stop_ids: int = 16,
    rule_sizes: RuleSizes | None = None,
    processors: tuple[LogitsProcessor, ...] = (),
) -> EngineState:
    """The empty engine over freshly made KV pages.

    kv: one `LayerKV` of `[N S K C]` per layer; N counts the null block.
    num_rows: usable rows; the state holds one more, the null row.
    max_blocks_per_row: M, so that a row holds at most M * S tokens.
    rule_sizes: room for rules that change logits; None: no row can have any.
    """
    N, S = kv[0].k.shape[:2]
    R, M = num_rows + 1, max_blocks_per_row
    return EngineState(
        rows=_empty_rows(R, M, S),
        pool=BlockPool(
            ref_count=jnp.zeros(N, jnp.int32).at[NULL_BLOCK].set(1),
            block_hash=jnp.zeros((N, 4), jnp.uint32),
            last_used=jnp.zeros(N, jnp.int32),
            clock=jnp.zeros((), jnp.int32),
        ),
        kv=kv,
        sampling=init_sampling_state(R, num_stop_ids, rule_sizes, processors),
        hash_key=hash_key,
        weights_version=jnp.zeros((), jnp.uint32),
    )


def _empty_rows(R: int, M: int, S: int) -> Rows:
    def counts() -> Array:  # a buffer each: one shared by two fields could not be donated
        return jnp.zeros(R, jnp.int32)

    return Rows(
        token_ids=jnp.zeros((R, M * S), jnp.int32),
        num_tokens=counts(),
        context_len=counts(),
        prompt_len=counts(),
        block_table=jnp.zeros((R, M), jnp.int32),
        num_blocks=counts(),
        root=jnp.zeros((R, 4), jnp.uint32),
        prefix_hash=jnp.zeros((R, 4), jnp.uint32),
        sample_index=counts(),
        adapter_id=counts(),
        active=jnp.zeros(R, bool),
    )


def check_invariants(state: EngineState, *, window: int | None = None) -> None:
    """Raises AssertionError if the state breaks a rule. For tests: reads the whole state.

    window: the model's, if it has one: blocks that lie wholly behind it are held by no row.
    """
    rows, pool = state.rows, state.pool
    table, num_blocks = np.asarray(rows.block_table), np.asarray(rows.num_blocks)
    ref_count, block_hash = np.asarray(pool.ref_count), np.asarray(pool.block_hash)
    N, (R, M), S = ref_count.size, table.shape, rows.block_size

    assert (table >= 0).all(), "block id out of range"
    assert (table < N).all(), "block id out of range"
    holders = np.bincount(table.ravel(), minlength=N)
    holders[NULL_BLOCK] = 1
    np.testing.assert_array_equal(ref_count, holders, err_msg="ref_count is not the table's")
    num_tokens, context_len = np.asarray(rows.num_tokens), np.asarray(rows.context_len)
    num_behind = 0 * context_len if window is None else np.maximum(context_len - window + 1, 0) // S
    column = np.arange(M)[None]
    in_use = (column >= num_behind[:, None]) & (column < num_blocks[:, None])
    np.testing.assert_array_equal(table != NULL_BLOCK, in_use, err_msg="table and num_blocks")

    assert (context_len <= num_tokens).all()
    assert (num_tokens <= M * S).all()
    assert (context_len <= num_blocks * S).all(), "KV without a block"
    assert not block_hash[NULL_BLOCK].any(), "the null block has a hash"
    assert not np.asarray(rows.active)[NULL_ROW], "the null row is active"
    assert num_blocks[NULL_ROW] == 0, "the null row holds blocks"
    free = ref_count == 0
    last_used = np.asarray(pool.last_used)
    assert last_used.max(initial=0) <= int(pool.clock)
    freed = last_used[free & (last_used > 0)]
    assert len(set(freed.tolist())) == freed.size, "two free blocks share a tick"
    for row in range(R):  # a block about to be written has one holder, or will be copied first
        written = table[row, : num_blocks[row]][-(-context_len[row] // S) :]
        assert (ref_count[written] == 1).all(), "an unwritten reserved block is shared"
