"""One layer's KV pages: how they are stored, written, read and copied.

The only module that knows the storage type. Half-precision pools are kept as uint16 bits on a CPU,
since XLA there converts a whole bfloat16 pool at every write (60 ms for 51 MB on jax 0.10.2), but
not where kernels write; 8-bit floats are kept as uint8 bits everywhere: XLA on a CPU is as slow
with them, and Triton does not know all of them.

A number of an 8-bit pool may have a scale, by which it is multiplied when it is read.
"""

from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jpaged.kv_format import FLOATS, Scales
from jpaged.native import block_copy as native_copy
from jpaged.native import kv_write as native_write
from jpaged.ops.heads import Heads
from jpaged.typing import Array, Float, Int, Shaped
from pallas_kernels import eight_bit, float8
from pallas_kernels.eight_bit import LARGEST

NULL_BLOCK = 0
DTYPES = (*FLOATS, *LARGEST)


@struct.dataclass
class LayerKV:
    """K and V of one layer: `[N S K C]` each, in the storage type of `dtype`.

    dtype: the logical type, one of `DTYPES`. k_scale, v_scale: what the numbers of an 8-bit pool
    are to be multiplied by: float32 `[]`, or `[N S K]`, or nothing. implementation: what writes
    and copies: "xla", "native" once `jpaged.native.library.load` has been called, or the kernels of
    "pallas".
    """

    k: Shaped[Array, "N S K C"]
    v: Shaped[Array, "N S K C"]
    dtype: str = struct.field(pytree_node=False)
    k_scale: Float[Array, "*slots"] | None = None
    v_scale: Float[Array, "*slots"] | None = None
    implementation: str = struct.field(pytree_node=False, default="xla")

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
    *,
    implementation: str = "xla",
) -> LayerKV:
    """An empty pool for one layer, all zeros. Scales of whole tensors are 1 until replaced.

    implementation: see `LayerKV`.

    Raises:
        ValueError: `dtype` is none of `DTYPES`, or a float of 16 or 32 bits with scales.
    """
    _check(dtype, scales)
    as_bits = (
        platform_is_cpu and implementation != "pallas" and dtype in FLOATS and dtype != "float32"
    )
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
        implementation=implementation,
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
    """Writes T tokens into their slots. Padding tokens carry slot 0: they land in the null block,
    or nowhere.

    8-bit pools take the nearest number, of two as near the even one; what is beyond the type's
    largest number becomes that number. Where scales go with tokens and heads, a scale is the
    head's largest magnitude over `LARGEST`.
    """
    if kv.implementation == "pallas":
        return _with_pools(
            kv, _kernels().write_kv(_pools_of(kv), k, v, slot_mapping, **_options(kv))
        )
    S = kv.k.shape[1]
    # Two indices: a scatter into a pool reshaped to [N*S K C] can copy the pool.
    at = (slot_mapping // S, slot_mapping % S)
    k_pool, k_scale = _write(kv.k, kv.k_scale, k, at, kv.dtype)
    v_pool, v_scale = _write(kv.v, kv.v_scale, v, at, kv.dtype)
    return replace(kv, k=k_pool, v=v_pool, k_scale=k_scale, v_scale=v_scale)


def take_heads(
    kv: LayerKV, heads: Heads, slot_mapping: Int[Array, " T"]
) -> tuple[Float[Array, "T H C"], LayerKV]:
    """Queries as attention takes them, and the KV after `write_kv` of keys and values likewise.

    C++ does it all at once, but for pools of 8 bits; kernels turn on the way.
    """
    if kv.implementation == "native" and not kv.is_quantized:
        return _take_heads_natively(kv, heads, slot_mapping)
    if heads.angles is not None and kv.implementation == "pallas":
        q, pools = _kernels().turn_and_write(
            _pools_of(kv), *heads.normalized(), *heads.angles, slot_mapping, **_options(kv)
        )
        return q, _with_pools(kv, pools)
    q, k, v = heads.turned()
    return q, write_kv(kv, k, v, slot_mapping)


def _take_heads_natively(
    kv: LayerKV, heads: Heads, slot_mapping: Int[Array, " T"]
) -> tuple[Float[Array, "T H C"], LayerKV]:
    if any(norm.weight.dtype != heads.packed.dtype for norm in heads.norms()):
        packed = jnp.concatenate(heads.normalized(), axis=1)
        heads = replace(heads, packed=packed, q_norm=None, k_norm=None)
    q_norm, k_norm = heads.q_norm, heads.k_norm
    one = q_norm or k_norm  # those of a model differ in weights alone
    at_rest = jnp.zeros((len(slot_mapping), 0))
    cos, sin = heads.angles or (at_rest, at_rest)
    q, k, v = native_write.take_heads(
        heads.packed,
        q_norm and q_norm.weight,
        k_norm and k_norm.weight,
        cos,
        sin,
        slot_mapping,
        kv.k,
        kv.v,
        kv_dtype=kv.dtype,
        eps=one.eps if one else 0.0,
        is_offset=bool(one and one.is_offset),
    )
    return q, replace(kv, k=k, v=v)


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
    pools, treedef = jax.tree.flatten(kv)
    per_block = tuple(pool for pool in pools if pool.ndim)  # but one scale for all blocks
    if kv.implementation == "pallas":
        from pallas_kernels.block_copy import block_copy

        copies = iter(block_copy(per_block, src, dst, interpret=is_interpreted()))
    elif kv.implementation == "native":
        copies = iter(native_copy.copy_blocks(per_block, src, dst))
    else:
        copies = (_copy(pool, src, dst) for pool in per_block)
    return treedef.unflatten(next(copies) if pool.ndim else pool for pool in pools)


def _copy(
    pool: Shaped[Array, "N *block"], src: Int[Array, " W"], dst: Int[Array, " W"]
) -> Shaped[Array, "N *block"]:
    blocks = pool.at[src].get(mode="promise_in_bounds")
    return pool.at[dst].set(blocks, mode="promise_in_bounds")


def kernel_pools(kv: LayerKV) -> tuple[Shaped[Array, "N S K C"], Shaped[Array, "N S K C"]]:
    """K and V as `pallas_kernels` take them: float8 alone is bits. A view, and not a copy."""
    if kv.k.dtype != jnp.uint16:
        return kv.k, kv.v
    k, v = (jax.lax.bitcast_convert_type(pool, jnp.dtype(kv.dtype)) for pool in (kv.k, kv.v))
    return k, v


def is_interpreted() -> bool:
    """Whether kernels run in XLA, for want of a GPU."""
    return jax.default_backend() == "cpu"


def _kernels() -> ModuleType:
    # Pallas takes long to import, and most who have a CPU do without.
    from pallas_kernels import kv_write

    return kv_write


def _pools_of(kv: LayerKV) -> Any:
    return _kernels().Pools(kv.k, kv.v, kv.k_scale, kv.v_scale)


def _with_pools(kv: LayerKV, pools: Any) -> LayerKV:
    return replace(kv, **pools._asdict())


def _options(kv: LayerKV) -> dict[str, Any]:
    return {"kv_dtype": kv.dtype, "interpret": is_interpreted()}


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
        x = x * (1 / scale)
    elif scale is not None:
        # NaN and infinity go into the scale, so that they are seen where a number can not be NaN.
        own = eight_bit.head_scale(jnp.max(jnp.abs(x), axis=-1), dtype)
        scale = scale.at[at].set(own, mode="promise_in_bounds")
        x = x * (1 / own)[..., None]
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
    if dtype in LARGEST:
        return eight_bit.encode(x, dtype)
    x = x.astype(dtype)
    return x if x.dtype == storage else jax.lax.bitcast_convert_type(x, storage)


def _decode(x: Shaped[Array, "..."], dtype: str) -> Float[Array, "..."]:
    """The inverse of `_encode`, as floats."""
    if dtype in float8.MAX:
        return float8.decode(x, dtype, jnp.float32)
    if dtype == "int8":
        return x.astype(jnp.float32)
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, jnp.dtype(dtype))
