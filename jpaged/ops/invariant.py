"""Row by row arithmetic whose bits do not depend on how many rows there are.

XLA chooses a kernel, and with it the order of a sum, by the shape of the whole array. On a CPU
(jax 0.10.2) a row of `x @ w` has settled bits from 33 rows on in float32 and from 3 rows on in
bfloat16, while reductions change with the number of elements. Elementwise operations are safe.
"""

import jax.numpy as jnp

from jpaged.typing import Array, Float

MIN_ROWS = {"float32": 34, "bfloat16": 4, "float16": 34}
"""Rows from which on a product's rows keep their bits, whatever the weight's shape."""


def pad_rows(x: Float[Array, "T D"], minimum: int) -> Float[Array, "padded_T D"]:
    """Adds rows of zeros up to `minimum`; the caller slices the first T rows of the result."""
    return jnp.pad(x, ((0, max(0, minimum - x.shape[0])), (0, 0)))


def sum_last(x: Float[Array, "*rows D"]) -> Float[Array, "*rows"]:
    """The sum over the last axis, halves added to halves: an order no shape can change."""
    rows = [(0, 0)] * (x.ndim - 1)
    while (width := x.shape[-1]) > 1:
        half = (width + 1) // 2
        x = x[..., :half] + jnp.pad(x[..., half:], [*rows, (0, 2 * half - width)])
    return x[..., 0]
