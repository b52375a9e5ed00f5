"""Checks of the kernels' arguments: shapes, types and what goes with what, before any launch.

Owns the storage types of KV pools. Values are not looked at: they may be traced.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

STORAGE = {
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "float32": jnp.float32,
    "int8": jnp.int8,
    "float8_e4m3fn": jnp.uint8,  # 8-bit floats are kept as bits
    "float8_e5m2": jnp.uint8,
}
"""The type a pool of each logical type is stored in."""

MAX_BYTES_OF_8_BITS = 2**31
"""The largest pool of 8 bits but for those above 2**32: up to there Pallas addresses with signed
32-bit numbers of elements, beyond it with 64 bits."""

Q_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
MAX_HEAD_DIM = 256


class AttentionShape(NamedTuple):
    """The sizes of an attention over pages, in the project's letters."""

    T: int  # queries; rows, where each has one
    B: int
    H: int
    K: int
    G: int
    C: int
    N: int
    S: int
    M: int


def check_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    block_table: jax.Array,
    context_lens: jax.Array,
    kv_dtype: str,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> AttentionShape:
    """The sizes of q [T H C] over pools [N S K C], block_table [B M] and context_lens [B].

    Raises:
        ValueError: shapes or types that do not go together, or that no kernel takes.
    """
    check_pools(k, v, kv_dtype)
    N, S, K, C = k.shape
    if q.ndim != 3 or q.shape[2] != C or q.shape[1] % K or q.shape[1] == 0:
        raise ValueError(
            f"q of shape {q.shape} does not go with pools {k.shape}: it must be [T H {C}], with H "
            f"a multiple of {K} KV heads"
        )
    if q.dtype not in Q_DTYPES:
        raise ValueError(f"q is {q.dtype}; it must be bfloat16, float16 or float32")
    if C > MAX_HEAD_DIM:
        raise ValueError(f"head dim {C} is above {MAX_HEAD_DIM}, the most that is supported")
    if block_table.ndim != 2 or context_lens.shape != block_table.shape[:1]:
        raise ValueError(
            f"block_table {block_table.shape} and context_lens {context_lens.shape} must be "
            "[B M] and [B]"
        )
    _check_int32(block_table=block_table, context_lens=context_lens)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale(name, scale, k)
    T, H, _ = q.shape
    if sinks is not None and sinks.shape != (H,):
        raise ValueError(f"sinks of shape {sinks.shape} must be [{H}], one for each query head")
    if window is not None and window < 1:
        raise ValueError(f"{window=} must be 1 or more; None lets a query see its whole context")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"{soft_cap=} must be above 0; None leaves scores as they are")
    B, M = block_table.shape
    return AttentionShape(T=T, B=B, H=H, K=K, G=H // K, C=C, N=N, S=S, M=M)


def check_query_start_loc(query_start_loc: jax.Array, context_lens: jax.Array) -> None:
    """Where each row's queries begin, and where the last one's end: int32 [B+1].

    Raises:
        ValueError: another shape or type.
    """
    (B,) = context_lens.shape
    if query_start_loc.shape != (B + 1,):
        raise ValueError(
            f"query_start_loc of shape {query_start_loc.shape} must be [{B + 1}], one more than "
            f"there are rows in context_lens"
        )
    _check_int32(query_start_loc=query_start_loc)


def check_pools(k: jax.Array, v: jax.Array, kv_dtype: str) -> None:
    """Pools [N S K C] of one shape, stored as `kv_dtype` is.

    Raises:
        ValueError: they differ, are stored otherwise, or are of a size that cannot be addressed.
    """
    if kv_dtype not in STORAGE:
        raise ValueError(f"{kv_dtype=} is unknown; choose one of {', '.join(STORAGE)}")
    if k.ndim != 4 or k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(
            f"pools must be [N S K C], alike: k is {k.dtype} {k.shape}, v is {v.dtype} {v.shape}"
        )
    stored = jnp.dtype(STORAGE[kv_dtype])
    if k.dtype != stored:
        raise ValueError(f"pools of {kv_dtype=} are stored as {stored}, these are {k.dtype}")
    if k.dtype.itemsize == 1 and not is_addressable(k.size):
        raise ValueError(
            f"a pool of {k.size} bytes in 8 bits: between 2**31 and 2**32 it cannot be addressed; "
            "take fewer blocks, or more"
        )


def is_addressable(num_bytes: int) -> bool:
    """Whether kernels can read and write a pool of 8 bits that has so many bytes."""
    return not MAX_BYTES_OF_8_BITS < num_bytes <= 2**32


def check_scale(name: str, scale: jax.Array | None, pool: jax.Array) -> None:
    """A scale is absent, one number, or a number for each token and head of pool [N S K C].

    Raises:
        ValueError: another shape, or not float32.
    """
    if scale is None:
        return
    if scale.shape not in ((), pool.shape[:3]) or scale.dtype != jnp.float32:
        raise ValueError(
            f"{name} is {scale.dtype} {scale.shape}; it must be float32, of shape () or "
            f"{pool.shape[:3]}"
        )


def _check_int32(**arrays: jax.Array) -> None:
    for name, array in arrays.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}; it must be int32")
