"""Quantized weights multiplied by the kernels, interpreted."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.ops.grouped import dequantize, quantize
from jpaged.ops.kernel_linear import for_kernels
from jpaged.ops.linear import linear, linear_by_row


@pytest.mark.parametrize(("bits", "D"), [("int8", 72), ("int4", 64)])
def test_products_are_those_of_the_floats(bits, D):
    rng = np.random.default_rng(0)
    weight = quantize(jnp.asarray(rng.normal(size=(D, 40)), jnp.float32), bits)
    x = jnp.asarray(rng.normal(size=(3, D)), jnp.bfloat16)
    wanted = np.asarray(x, np.float64) @ np.asarray(dequantize(weight, jnp.float32)[:D], np.float64)
    got = linear(for_kernels(weight), x, jnp.float32)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-4)
    assert linear(for_kernels(weight), x, jnp.bfloat16).dtype == jnp.bfloat16


def test_rows_by_row_have_the_same_bits_in_any_company():
    rng = np.random.default_rng(1)
    weight = for_kernels(quantize(jnp.asarray(rng.normal(size=(1024, 40)), jnp.float32), "int4"))
    x = jnp.asarray(rng.normal(size=(70, 1024)), jnp.float32)
    many = linear_by_row(weight, x, jnp.float32)
    np.testing.assert_array_equal(many[69:], linear_by_row(weight, x[69:], jnp.float32))
    assert (many[69:] != linear(weight, x[69:], jnp.float32)).any(), "no test of the tiling"
