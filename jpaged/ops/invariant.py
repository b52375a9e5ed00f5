"""Row by row arithmetic whose bits do not depend on how many rows there are.

XLA chooses a kernel, and with it the order of a sum, by the shape of the whole array. On a CPU
(jax 0.10.2) a row of `x @ w` has settled bits only from about 48 rows on in float32 and 6 in
bfloat16, less for wide matrices, and reductions change with the number of elements. Elementwise
operations are safe.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from jpaged.typing import Array, Float

Multiply = Callable[[Float[Array, "T D"]], Float[Array, "T F"]]

TILE_ROWS = 32  # a CPU multiplies 32 rows about as well as many
MIN_ROWS_BF16 = 8


def multiply_by_row(multiply: Multiply, x: Float[Array, "T D"]) -> Float[Array, "T F"]:
    """`multiply(x)`, a product with some matrix, with the same bits for a row in any company.

    bfloat16 rows need no more than a few others beside them. float32 and float16 rows are
    multiplied in tiles of one size: padding few rows to many would cost more.
    """
    T = x.shape[0]
    if x.dtype == jnp.bfloat16:
        return multiply(_pad_rows(x, max(T, MIN_ROWS_BF16)))[:T]
    tiles = _pad_rows(x, -(-T // TILE_ROWS) * TILE_ROWS).reshape(-1, TILE_ROWS, x.shape[1])
    products = multiply(tiles[0])[None] if len(tiles) == 1 else lax.map(multiply, tiles)
    return products.reshape(-1, products.shape[2])[:T]


def _pad_rows(x: Float[Array, "T D"], num_rows: int) -> Float[Array, "padded_T D"]:
    return jnp.pad(x, ((0, num_rows - x.shape[0]), (0, 0)))


def sum_last(x: Float[Array, "*rows D"]) -> Float[Array, "*rows"]:
    """The sum over the last axis, halves added to halves: an order no shape can change."""
    rows = [(0, 0)] * (x.ndim - 1)
    while (width := x.shape[-1]) > 1:
        half = (width + 1) // 2
        x = x[..., :half] + jnp.pad(x[..., half:], [*rows, (0, 2 * half - width)])
    return x[..., 0]
