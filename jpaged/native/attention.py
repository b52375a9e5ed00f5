"""Paged attention in C++: the same contract as `jpaged.ops.paged_attention`, which calls it.

Its results do not depend on a query's company, so that deterministic mode needs no form of its own.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.native import library
from jpaged.typing import Array, Float, Int, Shaped

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}  # as in the source


def attend(
    q: Float[Array, "T H C"],
    k: Shaped[Array, "N S K C"],
    v: Shaped[Array, "N S K C"],
    *,
    kv_dtype: str,
    block_table: Int[Array, "B M"],
    context_lens: Int[Array, " B"],
    query_start_loc: Int[Array, " B+1"],
    num_decode_rows: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H C"]:
    """`paged_attention` over pools whose bits are of the dtype `kv_dtype`.

    Has no derivative. Under `vmap` the calls come one after the other.

    Raises NativeUnavailableError if nothing is loaded, ValueError for a scale that is not above 0.
    """
    if not scale > 0:
        raise ValueError(f"{scale=} must be above 0: scale the queries, or take the form in XLA")
    call = jax.ffi.ffi_call(
        library.target("attention"),
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        vmap_method="sequential",
    )
    no_sinks = jnp.zeros(0, jnp.float32)
    return call(
        *(q, k, v, block_table, context_lens, query_start_loc),
        no_sinks if sinks is None else sinks.astype(jnp.float32),
        num_decode_rows=np.int64(num_decode_rows),
        q_dtype=np.int64(DTYPES[q.dtype.name]),
        kv_dtype=np.int64(DTYPES[kv_dtype]),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0),
        window=np.int64(window or 0),
    )
