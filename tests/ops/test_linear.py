"""Products: accumulated in float32, rounded once, the same bits where asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.ops.linear import linear, linear_by_row

pytestmark = pytest.mark.optimized


@pytest.mark.parametrize("multiply", [linear, linear_by_row])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_product_is_rounded_once(multiply, dtype: str):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 200)), dtype)
    weight = jnp.asarray(rng.normal(size=(200, 16)), dtype)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    unrounded = multiply(weight, x, jnp.float32)
    assert unrounded.dtype == jnp.float32
    np.testing.assert_allclose(unrounded, want, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(multiply(weight, x, dtype), unrounded.astype(dtype))


@pytest.mark.parametrize("shape", [(16, 24), (48, 32), (200, 160)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_by_row_has_the_same_bits_among_any_number_of_rows(dtype: str, shape: tuple[int, int]):
    multiply = jax.jit(lambda weight, x: linear_by_row(weight, x, jnp.float32))
    weight = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    x = np.random.default_rng(1).normal(size=(512, shape[0])).astype(jnp.dtype(dtype))
    whole = np.asarray(multiply(weight, x))
    for num_rows in (1, 2, 7, 33, 200):
        np.testing.assert_array_equal(multiply(weight, x[:num_rows]), whole[:num_rows])
