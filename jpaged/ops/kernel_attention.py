"""Paged attention by the kernels of `pallas_kernels`: the same contract as `paged_attention`, which
calls it.

Decoding rows go to one kernel and the others to another, which in deterministic mode takes all: its
result for a query does not depend on what stands beside it. Pallas is imported when first used.
"""

import jax
import jax.numpy as jnp

from jpaged.ops.kv_cache import LayerKV, kernel_pools
from jpaged.typing import Array, Float, Int


def attend(
    q: Float[Array, "T H C"],
    kv: LayerKV,
    *,
    block_table: Int[Array, "B M"],
    context_lens: Int[Array, " B"],
    query_start_loc: Int[Array, " B+1"],
    num_decode_rows: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
    deterministic: bool,
) -> Float[Array, "T H C"]:
    """`paged_attention`; where JAX runs on a CPU the kernels are interpreted."""
    from pallas_kernels.paged_decode import paged_decode
    from pallas_kernels.paged_prefill import paged_prefill

    pools = kernel_pools(kv)
    options = {
        "kv_dtype": kv.dtype,
        "k_scale": kv.k_scale,
        "v_scale": kv.v_scale,
        "scale": scale,
        "window": window,
        "soft_cap": soft_cap,
        "sinks": sinks,
        "interpret": jax.default_backend() == "cpu",
    }
    R = 0 if deterministic else num_decode_rows
    decoded, prefilled = q[:R], jnp.zeros_like(q[R:])
    if R:
        rows = {"block_table": block_table[:R], "context_lens": context_lens[:R]}
        decoded = paged_decode(decoded, *pools, **rows, **options)
    if prefilled.shape[0] and context_lens.shape[0] > R:
        rows = {
            "block_table": block_table[R:],
            "context_lens": context_lens[R:],
            "query_start_loc": query_start_loc[R:] - R,
        }
        prefilled = paged_prefill(q[R:], *pools, **rows, **options)
    return jnp.concatenate([decoded, prefilled])
