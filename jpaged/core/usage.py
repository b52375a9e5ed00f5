"""How the pool is used: what is held, shared, cached, and how much of it holds KV."""

import jax.numpy as jnp
from flax import struct

from jpaged.core.block_pool import is_hashed, num_free
from jpaged.core.state import EngineState
from jpaged.ops.kv_cache import NULL_BLOCK
from jpaged.typing import Array, Int


@struct.dataclass
class Usage:
    """Counts of blocks, but for the last. The null block counts for nothing."""

    num_free: Int[Array, ""]  # cached ones included
    num_held: Int[Array, ""]  # by one row or more
    num_cached: Int[Array, ""]  # free, and kept for requests that begin alike
    num_shared: Int[Array, ""]  # held by more than one row
    num_entries: Int[Array, ""]  # entries of block tables: the blocks there would be unshared
    num_kv_tokens: Int[Array, ""]  # slots of held blocks that hold KV


def usage(state: EngineState) -> Usage:
    """The pool's use now. A slot counts once, however many rows share its block."""
    rows, pool, S = state.rows, state.pool, state.rows.block_size
    column = jnp.arange(rows.block_table.shape[1], dtype=jnp.int32)[None]
    filled = jnp.clip(rows.context_len[:, None] - column * S, 0, S)
    slots = jnp.zeros_like(pool.ref_count).at[rows.block_table].max(filled)
    is_free = pool.ref_count == 0
    is_shared = (pool.ref_count > 1).at[NULL_BLOCK].set(False)

    def count(mask: Array) -> Int[Array, ""]:
        return jnp.sum(mask, dtype=jnp.int32)

    return Usage(
        num_free=num_free(pool),
        num_held=pool.ref_count.shape[0] - 1 - num_free(pool),
        num_cached=count(is_free & is_hashed(pool)),
        num_shared=count(is_shared),
        num_entries=count(rows.block_table != NULL_BLOCK),
        num_kv_tokens=jnp.sum(slots.at[NULL_BLOCK].set(0), dtype=jnp.int32),
    )
