"""Products with packed weights in C++; `jpaged.ops.packed` packs them and calls this."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jpaged.native import library
from jpaged.typing import Array, Float, Shaped

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}  # as in the source


def multiply(
    x: Float[Array, "T D"],
    panels: Shaped[Array, "panels ..."],
    scales: Float[Array, "panels steps 32"] | None,
    mins: Float[Array, "panels steps 32"] | None,
    *,
    kind: str,
    num_out: int,
    dtype: DTypeLike,
) -> Float[Array, "T F"]:
    """x times a packed weight, summed in float32 and rounded once, to `dtype`.

    scales, mins: float16, of quantized kinds. A row has the same bits in any company. Has no
    derivative. Under `vmap` the calls come one after the other.

    Raises NativeUnavailableError if nothing is loaded.
    """
    none = jnp.zeros(0, jnp.float16)
    call = jax.ffi.ffi_call(
        library.target("matmul"),
        jax.ShapeDtypeStruct((x.shape[0], num_out), dtype),
        vmap_method="sequential",
    )
    return call(
        *(x, panels, none if scales is None else scales, none if mins is None else mins),
        kind=np.int64(KINDS[kind]),
    )
