"""The bits of a row do not depend on the number, the place or the contents of other rows."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jpaged.ops.invariant import multiply_by_row, sum_last

pytestmark = pytest.mark.optimized

ALL_ROWS = 512
COUNTS = [1, 2, 3, 5, 8, 17, 32, 33, 34, 64, 200]


@jax.jit
def product(x, weight):
    return lax.dot(x, weight, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


@jax.jit
def norm(x):
    return x * lax.rsqrt(sum_last(x * x) / x.shape[-1] + 1e-6)[..., None]


@jax.jit
def plain_norm(x):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def differing_counts(f, x):
    """The row counts at which some row, put in a random place, has other bits than among all."""
    rng, x = np.random.default_rng(1), np.asarray(x)  # taking rows of NumPy's compiles nothing
    whole = np.asarray(f(x))
    differing = []
    for count in COUNTS:
        rows = rng.permutation(ALL_ROWS)[:count]
        if np.asarray(f(x[rows])).tobytes() != whole[rows].tobytes():
            differing.append(count)
    return differing


def random(shape, dtype):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


shapes = pytest.mark.parametrize("shape", [(576, 1536), (1536, 576), (576, 192), (64, 128)])


@shapes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_by_row_keep_their_bits(dtype, shape):
    weight = random(shape, dtype)
    by_row = jax.jit(lambda x: multiply_by_row(lambda rows: product(rows, weight), x))
    assert differing_counts(by_row, random((ALL_ROWS, shape[0]), dtype)) == []


@pytest.mark.parametrize("width", [24, 64, 576, 1536])
def test_norms_by_halves_keep_their_bits(width):
    x = random((ALL_ROWS, width), "float32")
    assert differing_counts(norm, x) == []
    np.testing.assert_allclose(norm(x), plain_norm(x), rtol=2e-6)


@pytest.mark.parametrize("name", ["silu", "gelu", "tanh"])
def test_elementwise_operations_keep_their_bits(name):
    f = jax.jit(getattr(jax.nn, name))
    assert differing_counts(f, random((ALL_ROWS, 64), "float32")) == []


@pytest.mark.parametrize("shape", [(3,), (2, 7), (4, 2, 24), (1, 1)])
def test_sum_by_halves_is_the_sum(shape):
    x = random(shape, "float32")
    np.testing.assert_allclose(sum_last(x), np.sum(np.asarray(x), -1), rtol=1e-5, atol=1e-6)


def test_the_control_without_padding_differs():
    weight = random((576, 1536), "float32")
    x = random((ALL_ROWS, 576), "float32")
    assert differing_counts(ft.partial(product, weight=weight), x)
    assert differing_counts(plain_norm, random((ALL_ROWS, 64), "float32"))
