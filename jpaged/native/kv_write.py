"""Queries made of a projection's heads, and keys and values written, in C++; `jpaged.ops.kv_cache`
calls it."""

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.native import library
from jpaged.native.attention import DTYPES
from jpaged.typing import Array, Float, Int, Shaped

POOLS = {6: 1, 7: 2}  # arguments that are results: the same memory


def take_heads(
    heads: Float[Array, "T H+2*K C"],
    q_norm: Float[Array, " C"] | None,
    k_norm: Float[Array, " C"] | None,
    cos: Float[Array, "T X"],
    sin: Float[Array, "T X"],
    slot_mapping: Int[Array, " T"],
    k: Shaped[Array, "N S K C"],
    v: Shaped[Array, "N S K C"],
    *,
    kv_dtype: str,
    eps: float,
    is_offset: bool,
) -> tuple[Float[Array, "T H C"], Shaped[Array, "N S K C"], Shaped[Array, "N S K C"]]:
    """Queries, and the pools with the tokens' keys and values in their slots, in place.

    heads: each token's queries, keys and values.
    q_norm, k_norm: weights of the heads' dtype for RMS norms of queries and keys, with `eps` and
        `is_offset` as in `jpaged.ops.norm`; None: they are not normalized.
    cos, sin: by which queries and keys are turned, as in `rope.apply_rope`; X may be 0.
    slot_mapping: slots of the null block are left out. No two others are the same.
    k, v: pools whose bits are of the dtype `kv_dtype`.

    Has no derivative. Under `vmap` the calls come one after the other.

    Raises NativeUnavailableError if nothing is loaded.
    """
    T, num_heads, C = heads.shape
    H = num_heads - 2 * k.shape[2]
    results = [((T, H, C), heads.dtype), (k.shape, k.dtype), (v.shape, v.dtype)]
    call = jax.ffi.ffi_call(
        library.target("kv_write"),
        [jax.ShapeDtypeStruct(*result) for result in results],
        input_output_aliases=POOLS,
        vmap_method="sequential",
    )
    none = jnp.zeros(0, heads.dtype)
    q, k, v = call(
        heads,
        none if q_norm is None else q_norm,
        none if k_norm is None else k_norm,
        *(cos, sin, slot_mapping, k, v),
        dtype=np.int64(DTYPES[heads.dtype.name]),
        kv_dtype=np.int64(DTYPES[kv_dtype]),
        eps=np.float32(eps),
        is_offset=is_offset,
    )
    return q, k, v
