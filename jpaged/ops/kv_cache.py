"""One layer's KV pages: how they are stored, written, read and copied.

The only module that knows the storage type. A bfloat16 pool is kept as uint16 bits on a CPU, since
XLA there converts a whole bfloat16 pool at every write (60 ms for 51 MB on jax 0.10.2).
"""

import jax
import jax.numpy as jnp
from flax import struct

from jpaged.typing import Array, Float, Int, Shaped

NULL_BLOCK = 0


@struct.dataclass
class LayerKV:
    """K and V of one layer: `[N S K C]` each, in the storage type of `dtype`."""

    k: Shaped[Array, "N S K C"]
    v: Shaped[Array, "N S K C"]
    dtype: str = struct.field(pytree_node=False)  # the logical type: float32, bfloat16, float16
