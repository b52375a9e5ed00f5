"""What one step works on: the packed tokens of its rows, and where their KV goes.

Knows nothing of requests or models. A model receives a `Batch`, and nothing else of the engine.

Tokens are packed row by row. The first `num_decode_rows` rows own exactly one token each, at index
b for row b, granted or not; the tokens of the other rows follow, ragged, and padding comes last:

    token   0    1    2    3    4    5    6    7    8    9
    row     0    1    2    3    3    3    3    4    4    -      num_decode_rows = 3
            |-decode--|    |--- prefill ---------|    padding (slot 0, position 0)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from flax import struct

from jpaged.ops.kv_cache import LayerKV
from jpaged.typing import Array, Float, Int

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
    block_table: Int[Array, "B M"]  # block 0 past the row's blocks
    query_start_loc: Int[Array, " B+1"]  # token range of each row: [start_loc[b], start_loc[b+1])
    num_decode_rows: int = struct.field(pytree_node=False)


class Forward(NamedTuple):
    """A model as the core sees it: two pure functions. Hashable, hence static under `jit`.

    hidden: (params, batch, kv) -> (Float[T D], kv), the last hidden state of every token, the KV of
        the step's tokens written into their slots.
    logits: (params, Float[B D]) -> Float[B V], float32, of chosen tokens.
    """

    hidden: Callable[[Any, Batch, KVCache], tuple[Float[Array, "T D"], KVCache]]
    logits: Callable[[Any, Float[Array, "B D"]], Float[Array, "B V"]]
