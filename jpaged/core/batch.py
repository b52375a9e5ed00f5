"""What one step works on: the packed tokens of its rows, and where their KV goes.

Knows nothing of requests or models. A model receives a `Batch`, and nothing else of the engine.

Tokens are packed row by row. The first `num_decode_rows` rows own exactly one token each, at index
b for row b, granted or not; the tokens of the other rows follow, ragged, and padding comes last:

    token   0    1    2    3    4    5    6    7    8    9
    row     0    1    2    3    3    3    3    4    4    -      num_decode_rows = 3
            |-decode--|    |--- prefill ---------|    padding (slot 0, position 0)
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from flax import struct

from jpaged.ops.kv_cache import LayerKV
from jpaged.typing import Array, Float, Int

if TYPE_CHECKING:
    from jpaged.core.state import Rows

KVCache = tuple[LayerKV, ...]


@struct.dataclass
class Batch:
    """The inputs of one forward pass. B rows, T tokens; padding tokens carry slot 0."""

    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    token_rows: Int[Array, " T"]  # index into the step's rows; padding tokens name row B - 1
    slot_mapping: Int[Array, " T"]  # block_id * S + offset; padding: 0, in the null block
    context_lens: Int[Array, " B"]  # tokens with KV after this step's writes; 0: nothing to attend
    prompt_lens: Int[Array, " B"]  # the rows' prompt lengths (dynamic rope depends on them)
    block_table: Int[Array, "B M"]  # block 0 past the row's blocks, and where none is needed again
    query_start_loc: Int[Array, " B+1"]  # token range of each row: [start_loc[b], start_loc[b+1])
    num_decode_rows: int = struct.field(pytree_node=False)


class Forward(NamedTuple):
    """A model as the core sees it: two pure functions. Hashable, hence static under `jit`.

    hidden: (params, batch, kv) -> (Float[T D], kv), the last hidden state of every token, the KV of
        the step's tokens written into their slots.
    logits: (params, Float[B D]) -> Float[B V], float32, of chosen tokens.
    window: no query looks at more positions than these, its own included; None: at all.
    """

    hidden: Callable[[Any, Batch, KVCache], tuple[Float[Array, "T D"], KVCache]]
    logits: Callable[[Any, Float[Array, "B D"]], Float[Array, "B V"]]
    window: int | None = None


def make_batch(
    rows: "Rows",
    row_ids: Int[Array, " B"],
    num_new: Int[Array, " B"],
    *,
    num_tokens: int,
    num_decode_rows: int,
) -> Batch:
    """Packs the next `num_new[b]` tokens after each row's context.

    num_new: at most 1 for the first `num_decode_rows` rows, at most `num_tokens - num_decode_rows`
        for the others together; their blocks are reserved. Rows with 0 take no part.
    num_tokens: T, static. Rows' contexts are those before this step's writes.
    """
    B, S = row_ids.shape[0], rows.block_size
    start_loc = _start_loc(num_new, num_decode_rows)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    token_rows = jnp.searchsorted(start_loc[1:], token, side="right").astype(jnp.int32)
    is_token = token_rows < B
    token_rows = jnp.minimum(token_rows, B - 1)
    offset = token - start_loc[token_rows]
    is_token &= offset < num_new[token_rows]  # a decode row that was granted nothing

    context_len = rows.context_len[row_ids]
    positions = jnp.where(is_token, context_len[token_rows] + offset, 0)
    table = rows.block_table[row_ids]
    slot = table[token_rows, positions // S] * S + positions % S
    return Batch(
        token_ids=jnp.where(is_token, rows.token_ids[row_ids[token_rows], positions], 0),
        positions=positions,
        token_rows=token_rows,
        slot_mapping=jnp.where(is_token, slot, 0),
        context_lens=jnp.where(num_new > 0, context_len + num_new, 0),
        prompt_lens=rows.prompt_len[row_ids],
        block_table=table,
        query_start_loc=start_loc,
        num_decode_rows=num_decode_rows,
    )


def _start_loc(num_new: Int[Array, " B"], num_decode_rows: int) -> Int[Array, " B+1"]:
    width = jnp.where(jnp.arange(num_new.shape[0]) < num_decode_rows, 1, num_new)
    ends = jnp.cumsum(width, dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
