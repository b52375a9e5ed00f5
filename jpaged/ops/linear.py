"""A product with a weight. The type of the weight chooses the arithmetic.

Plain arrays are multiplied here; another weight registers its own form under `linear`, and under
`add_linear` and `gated_linear` if it makes rows, adds results and gates them on its own.
"""

import functools as ft
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jpaged.ops.activation import gate
from jpaged.ops.invariant import multiply_by_row
from jpaged.ops.rows import Rows, made
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


@ft.singledispatch
def linear_by_row(weight: Any, x: Float[Array, "T D"], dtype: DTypeLike) -> Float[Array, "T F"]:
    """`linear` whose rows have the same bits however many there are."""
    return multiply_by_row(lambda rows: linear(weight, rows, dtype), x)


@ft.singledispatch
def add_linear(
    weight: Any,
    rows: Rows,
    dtype: DTypeLike,
    residual: Float[Array, "T F"] | None = None,
    *,
    row_invariant: bool = False,
) -> Float[Array, "T F"]:
    """`linear` of rows that may be yet to be made, and the rounded product added to `residual`.

    residual: of `dtype`. row_invariant: as `linear_by_row`.
    """
    multiply = linear_by_row if row_invariant else linear
    y = multiply(weight, made(rows), dtype)
    return y if residual is None else residual + y


@ft.singledispatch
def gated_linear(
    weight: Any,
    rows: Rows,
    dtype: DTypeLike,
    activation: str,
    *,
    row_invariant: bool = False,
) -> Float[Array, "T F"]:
    """`add_linear` with a weight `[D 2*F]` of gates and ups: activation(gate) * up."""
    return gate(add_linear(weight, rows, dtype, row_invariant=row_invariant), activation)
