"""Copies of blocks within their pools, in C++; `jpaged.ops.kv_cache` calls it."""

from collections.abc import Sequence

import jax

from jpaged.native import library
from jpaged.typing import Array, Int, Shaped


def copy_blocks(
    pools: Sequence[Shaped[Array, "N *block"]], src: Int[Array, " W"], dst: Int[Array, " W"]
) -> list[Shaped[Array, "N *block"]]:
    """Each pool with block `src[w]` copied over `dst[w]`, in place; all reads come first.

    src, dst: int32, in range; no two differing pairs name one `dst`.

    Under `vmap` the calls come one after the other.

    Raises NativeUnavailableError if nothing is loaded.
    """
    call = jax.ffi.ffi_call(
        library.target("block_copy"),
        [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        input_output_aliases={i + 2: i for i in range(len(pools))},
        vmap_method="sequential",
    )
    return list(call(src, dst, *pools))
