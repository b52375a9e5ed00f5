"""A product with a weight. The type of the weight chooses the arithmetic.

Plain arrays are multiplied here; a quantized weight registers its own form under `linear`.
"""

import functools as ft
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jpaged.typing import Array, Float


@ft.singledispatch
def linear(weight: Any, x: Float[Array, "T D"], dtype: DTypeLike) -> Float[Array, "T F"]:
    """x @ weight for a weight that stands for `[D F]`, accumulated in float32.

    x and a plain weight are of one dtype; the result is rounded once, to `dtype`.
    """
    # float32 is full precision on GPUs too, not TF32.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    # Asked for a float32 result, a CPU uses its bfloat16 units: three times as fast.
    y = lax.dot(x, weight, precision=precision, preferred_element_type=jnp.float32)
    return y.astype(dtype)


def linear_by_row(weight: Any, x: Float[Array, "T D"], dtype: DTypeLike) -> Float[Array, "T F"]:
    """`linear` whose rows have the same bits however many there are."""
    # For few rows XLA's CPU products take other kernels. Measured for matrices from [8, 8] to
    # [2048, 512]: bfloat16 rows differ up to 6 of them, float32 and float16 rows up to 48.
    min_rows = 8 if x.dtype == jnp.bfloat16 else 64
    T = x.shape[0]
    padded = jnp.pad(x, ((0, max(0, min_rows - T)), (0, 0)))
    return linear(weight, padded, dtype)[:T]
