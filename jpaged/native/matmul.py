"""Products with packed weights in C++; `jpaged.ops.packed` packs them and calls this."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jpaged.native import library
from jpaged.typing import Array, Float, Shaped

PANEL = 32  # outputs that stand side by side in a weight
KINDS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}  # as in the source
MAKINGS = {"nothing": 0, "rms_norm": 1, "offset_rms_norm": 2}
GATINGS = {None: 0, "silu": 1, "gelu_tanh": 2}


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
    gating: str | None = None,
    kind: str,
    num_out: int,
    dtype: DTypeLike,
) -> Float[Array, "T F"]:
    """x times a packed weight, summed in float32 and rounded once, to `dtype`.

    scales, mins: float16, of quantized kinds.
    residual: of `dtype`, to which the rounded product is added.
    making: what is multiplied are not x's rows but their RMS norms, by a weight `norm` of x's
        dtype, rounded as `jpaged.ops.rows.made` rounds.
    gating: the weight is one of F gates and, behind them, F ups, F a multiple of PANEL; the result
        is activation(gate) * up, of gates and ups that were rounded.

    A row has the same bits in any company. Has no derivative. Under `vmap` the calls come one after
    the other.

    Raises NativeUnavailableError if nothing is loaded.
    """
    if gating is not None and num_out % PANEL:
        raise ValueError(f"gates are whole panels of {PANEL}, not {num_out}")
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
        gating=np.int64(GATINGS[gating]),
        eps=np.float32(eps),
    )
