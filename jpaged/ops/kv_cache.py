"""One layer's KV pages: how they are stored, written, read and copied.

The only module that knows the storage type. Half-precision pools are kept as uint16 bits on a CPU,
since XLA there converts a whole bfloat16 pool at every write (60 ms for 51 MB on jax 0.10.2); 8-bit
floats are kept as uint8 bits everywhere: XLA on a CPU is as slow with them, and Triton does not
know all of them.

A number of an 8-bit pool may have a scale, by which it is multiplied when it is read.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jpaged.kv_format import FLOATS, Scales
from jpaged.typing import Array, Float, Int, Shaped
from pallas_kernels import float8

NULL_BLOCK = 0
LARGEST = {"int8": 127.0, **float8.MAX}
"""The 8-bit dtypes, and what a scale per token and head makes of a head's largest number."""
DTYPES = (*FLOATS, *LARGEST)

_LEAST_PEAK = 1e-30  # a scale must not be 0, nor so small that its inverse is infinite


@struct.dataclass
class LayerKV:
    """K and V of one layer: `[N S K C]` each, in the storage type of `dtype`.

    dtype: the logical type, one of `DTYPES`. k_scale, v_scale: what the numbers of an 8-bit pool
    are to be multiplied by: float32 `[]`, or `[N S K]`, or nothing.
    """

    k: Shaped[Array, "N S K C"]
    v: Shaped[Array, "N S K C"]
    dtype: str = struct.field(pytree_node=False)
    k_scale: Float[Array, "*slots"] | None = None
    v_scale: Float[Array, "*slots"] | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether there are 8 bits to a number."""
        return self.dtype in LARGEST


def init_layer_kv(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    platform_is_cpu: bool,
    scales: Scales = "none",
) -> LayerKV:
    """An empty pool for one layer, all zeros. Scales of whole tensors are 1 until replaced.

    Raises:
        ValueError: `dtype` is none of `DTYPES`, or a float of 16 or 32 bits with scales.
    """
    _check(dtype, scales)
    as_bits = platform_is_cpu and dtype in FLOATS and dtype != "float32"
    storage = jnp.uint16 if as_bits else jnp.uint8 if dtype in float8.MAX else jnp.dtype(dtype)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)

    def scale() -> Float[Array, "*slots"] | None:
        if scales == "none":
            return None
        return jnp.ones(() if scales == "tensor" else shape[:3], jnp.float32)

    return LayerKV(
        k=jnp.zeros(shape, storage),
        v=jnp.zeros(shape, storage),
        dtype=dtype,
        k_scale=scale(),
        v_scale=scale(),
    )


def layer_kv_bytes(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    scales: Scales = "none",
) -> int:
    """Bytes of one layer's K and V together, their scales included. Raises as `init_layer_kv`."""
    _check(dtype, scales)
    num_scales = {
        "none": 0,
        "tensor": 1,
        "token_head": num_blocks * block_size * num_kv_heads,
    }[scales]
    itemsize = 1 if dtype in LARGEST else jnp.dtype(dtype).itemsize
    return 2 * (num_blocks * block_size * num_kv_heads * head_dim * itemsize + 4 * num_scales)


def write_kv(
    kv: LayerKV,
    k: Float[Array, "T K C"],
    v: Float[Array, "T K C"],
    slot_mapping: Int[Array, " T"],
) -> LayerKV:
    """Writes T tokens into their slots. Padding tokens carry slot 0 and land in the null block.

    8-bit pools take the nearest number, of two as near the even one; what is beyond the type's
    largest number becomes that number. Where scales go with tokens and heads, a scale is the
    head's largest magnitude over `LARGEST`.
    """
    S = kv.k.shape[1]
    # Two indices: a scatter into a pool reshaped to [N*S K C] can copy the pool.
    at = (slot_mapping // S, slot_mapping % S)
    k_pool, k_scale = _write(kv.k, kv.k_scale, k, at, kv.dtype)
    v_pool, v_scale = _write(kv.v, kv.v_scale, v, at, kv.dtype)
    return replace(kv, k=k_pool, v=v_pool, k_scale=k_scale, v_scale=v_scale)


def read_blocks(
    kv: LayerKV, block_ids: Int[Array, "..."]
) -> tuple[Float[Array, "... S K C"], Float[Array, "... S K C"]]:
    """K and V of the named blocks: in the logical dtype, or in float32 those of an 8-bit pool."""
    return (
        _read(kv.k, kv.k_scale, block_ids, kv.dtype),
        _read(kv.v, kv.v_scale, block_ids, kv.dtype),
    )


def copy_blocks(kv: LayerKV, src: Int[Array, " W"], dst: Int[Array, " W"]) -> LayerKV:
    """Copies block `src[w]` over `dst[w]`, scales too; padding names the null block twice.

    All reads come before all writes, so a block may be read by one copy and written by another.
    """

    def copied(pool: Shaped[Array, "*pool"]) -> Shaped[Array, "*pool"]:
        if pool.ndim == 0:  # one scale for all blocks
            return pool
        blocks = pool.at[src].get(mode="promise_in_bounds")
        return pool.at[dst].set(blocks, mode="promise_in_bounds")

    return jax.tree.map(copied, kv)


def kernel_pools(kv: LayerKV) -> tuple[Shaped[Array, "N S K C"], Shaped[Array, "N S K C"]]:
    """K and V as `pallas_kernels` take them: float8 alone is bits. A view, and not a copy."""
    if kv.k.dtype != jnp.uint16:
        return kv.k, kv.v
    k, v = (jax.lax.bitcast_convert_type(pool, jnp.dtype(kv.dtype)) for pool in (kv.k, kv.v))
    return k, v


def _check(dtype: str, scales: Scales) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"KV cache dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
    if scales != "none" and dtype in FLOATS:
        raise ValueError(f"a KV cache of {dtype} has no scales; choose one of {', '.join(LARGEST)}")


def _write(
    pool: Shaped[Array, "N S K C"],
    scale: Float[Array, "*slots"] | None,
    x: Float[Array, "T K C"],
    at: tuple[Int[Array, " T"], Int[Array, " T"]],
    dtype: str,
) -> tuple[Shaped[Array, "N S K C"], Float[Array, "*slots"] | None]:
    """The pool and its scales, with x in the places `at`."""
    if dtype in LARGEST:
        x = x.astype(jnp.float32)
    if scale is not None and scale.ndim == 0:
        x = x / scale
    elif scale is not None:
        # NaN and infinity go into the scale, so that they are seen where a number can not be NaN.
        peak = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), _LEAST_PEAK)
        own = peak / LARGEST[dtype]
        scale = scale.at[at].set(own, mode="promise_in_bounds")
        x = x / own[..., None]
    stored = _encode(x, dtype, pool.dtype)
    return pool.at[at].set(stored, mode="promise_in_bounds"), scale


def _read(
    pool: Shaped[Array, "N S K C"],
    scale: Float[Array, "*slots"] | None,
    block_ids: Int[Array, "..."],
    dtype: str,
) -> Float[Array, "... S K C"]:
    # After the gather: only what was read is converted.
    x = _decode(pool.at[block_ids].get(mode="promise_in_bounds"), dtype)
    if scale is None:
        return x
    if scale.ndim == 0:
        return x * scale
    return x * scale.at[block_ids].get(mode="promise_in_bounds")[..., None]


def _encode(x: Float[Array, "..."], dtype: str, storage: DTypeLike) -> Shaped[Array, "..."]:
    """The stored form of new keys or values: bits where the pool holds bits."""
    if dtype in float8.MAX:
        return float8.encode(x, dtype)
    if dtype == "int8":
        return jnp.clip(jnp.round(x), -128, 127).astype(jnp.int8)
    x = x.astype(dtype)
    return x if x.dtype == storage else jax.lax.bitcast_convert_type(x, storage)


def _decode(x: Shaped[Array, "..."], dtype: str) -> Float[Array, "..."]:
    """The inverse of `_encode`, as floats."""
    if dtype in float8.MAX:
        return float8.decode(x, dtype, jnp.float32)
    if dtype == "int8":
        return x.astype(jnp.float32)
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, jnp.dtype(dtype))
