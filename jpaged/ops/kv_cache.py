"""One layer's KV pages: how they are stored, written, read and copied.

The only module that knows the storage type. Half-precision pools are kept as uint16 bits on a CPU,
since XLA there converts a whole bfloat16 pool at every write (60 ms for 51 MB on jax 0.10.2).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from jpaged.typing import Array, Float, Int, Shaped

NULL_BLOCK = 0
DTYPES = ("float32", "bfloat16", "float16")


@struct.dataclass
class LayerKV:
    """K and V of one layer: `[N S K C]` each, in the storage type of `dtype`."""

    k: Shaped[Array, "N S K C"]
    v: Shaped[Array, "N S K C"]
    dtype: str = struct.field(pytree_node=False)  # the logical type: float32, bfloat16, float16


def init_layer_kv(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    platform_is_cpu: bool,
) -> LayerKV:
    """An empty pool for one layer, all zeros.

    Raises:
        ValueError: `dtype` is none of float32, bfloat16, float16.
    """
    if dtype not in DTYPES:
        raise ValueError(f"KV cache dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    as_bits = platform_is_cpu and dtype != "float32"
    storage = jnp.uint16 if as_bits else jnp.dtype(dtype)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return LayerKV(k=jnp.zeros(shape, storage), v=jnp.zeros(shape, storage), dtype=dtype)


def layer_kv_bytes(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str
) -> int:
    """Bytes of one layer's K and V together."""
    return 2 * num_blocks * block_size * num_kv_heads * head_dim * jnp.dtype(dtype).itemsize


def write_kv(
    kv: LayerKV,
    k: Float[Array, "T K C"],
    v: Float[Array, "T K C"],
    slot_mapping: Int[Array, " T"],
) -> LayerKV:
    """Writes T tokens into their slots. Padding tokens carry slot 0 and land in the null block."""
    S = kv.k.shape[1]
    # Two indices: a scatter into a pool reshaped to [N*S K C] can copy the pool.
    at = (slot_mapping // S, slot_mapping % S)
    return replace(
        kv,
        k=kv.k.at[at].set(_encode(k, kv), mode="promise_in_bounds"),
        v=kv.v.at[at].set(_encode(v, kv), mode="promise_in_bounds"),
    )


def read_blocks(
    kv: LayerKV, block_ids: Int[Array, "..."]
) -> tuple[Float[Array, "... S K C"], Float[Array, "... S K C"]]:
    """K and V of the named blocks, in the logical dtype."""
    k = kv.k.at[block_ids].get(mode="promise_in_bounds")
    v = kv.v.at[block_ids].get(mode="promise_in_bounds")
    return _decode(k, kv), _decode(v, kv)


def copy_blocks(kv: LayerKV, src: Int[Array, " W"], dst: Int[Array, " W"]) -> LayerKV:
    """Copies block `src[w]` over `dst[w]`; padding names the null block twice.

    All reads come before all writes, so a block may be read by one copy and written by another.
    """

    def copied(pool: Shaped[Array, "N S K C"]) -> Shaped[Array, "N S K C"]:
        blocks = pool.at[src].get(mode="promise_in_bounds")
        return pool.at[dst].set(blocks, mode="promise_in_bounds")

    return replace(kv, k=copied(kv.k), v=copied(kv.v))


def _encode(x: Float[Array, "..."], kv: LayerKV) -> Shaped[Array, "..."]:
    """The stored form of new keys or values: bits where the pool holds bits."""
    x = x.astype(kv.dtype)
    return x if x.dtype == kv.k.dtype else jax.lax.bitcast_convert_type(x, kv.k.dtype)


def _decode(x: Shaped[Array, "..."], kv: LayerKV) -> Float[Array, "..."]:
    """The inverse of `_encode`, after the gather: only what was read is converted."""
    return x if x.dtype == kv.dtype else jax.lax.bitcast_convert_type(x, jnp.dtype(kv.dtype))
