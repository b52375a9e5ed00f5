"""Products with packed weights in C++; `jpaged.ops.packed` packs them and calls this."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jpaged.native import library
from jpaged.typing import Array, Float, Shaped

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}  # as in the source
MAKINGS = {"nothing": 0, "rms_norm": 1, "offset_rms_norm": 2, "silu": 3, "gelu_tanh": 4}


def multiply(
    x: Float[Array, "T D"],
    panels: Shaped[Array, "panels ..."],
    scales: Float[Array, "panels steps 32"] | None,
    mins: Float[Array, "panels steps 32"] | None,
    residual: Float[Array, "T F"] | None = None,
    *,
    making: str = "nothing",
    norm: Float[Array, " D"] | None = None,
    eps: float = 0.0,
    kind: str,
    num_out: int,
    dtype: DTypeLike,
) -> Float[Array, "T F"]:
    """x times a packed weight, summed in float32 and rounded once, to `dtype`.

    scales, mins: float16, of quantized kinds.
    residual: of `dtype`, to which the rounded product is added.
    making: what is multiplied are not x's rows but their RMS norms, by a weight `norm` of x's
        dtype, or rows of gates and ups, `[T 2*D]`, by an activation. All are rounded as
        `jpaged.ops.rows.made` rounds.

    A row has the same bits in any company. Has no derivative. Under `vmap` the calls come one after
    the other.

    Raises NativeUnavailableError if nothing is loaded.
    """
    call = jax.ffi.ffi_call(
        library.target("matmul"),
        jax.ShapeDtypeStruct((x.shape[0], num_out), dtype),
        vmap_method="sequential",
    )
    none = jnp.zeros(0, jnp.float16)
    optional = (none if y is None else y for y in (scales, mins, norm, residual))
    return call(
        *(x, panels, *optional),
        kind=np.int64(KINDS[kind]),
        making=np.int64(MAKINGS[making]),
        eps=np.float32(eps),
    )
