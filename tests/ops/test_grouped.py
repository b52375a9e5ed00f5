"""Weights in groups: the numbers are those of plain NumPy, and so are their products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.ops.grouped import GroupedRows, dequantize, join, quantize, transpose
from jpaged.ops.linear import linear, linear_by_row
from tests.oracles.grouped import quantized_values, stored_values

pytestmark = pytest.mark.optimized

BITS = ("int8", "int4")


def make_weight(D: int, F: int, seed: int = 0) -> np.ndarray:
    """Columns of very different sizes; one group of zeros, one of equal numbers."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(D, F)) * 10.0 ** rng.integers(-4, 3, size=F)
    weight[:32, 0], weight[:32, 1] = 0, 0.3
    return weight.astype(np.float32)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [(64, 5), (33, 3), (7, 2)], ids=str)
def test_numbers_are_plain_numpys(bits, size):
    weight = make_weight(*size)
    got = np.asarray(dequantize(quantize(jnp.asarray(weight), bits), jnp.float32))
    padding = got[size[0] :]
    # Zeros fill the last group, which may have a least: nothing multiplies what they stand for.
    assert padding.shape[0] == -size[0] % 32
    np.testing.assert_array_equal(got[: size[0]], quantized_values(weight, bits))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_and_float32_weights_lose_half_a_step_at_most(bits, dtype):
    weight = jnp.asarray(make_weight(128, 4), dtype)
    grouped = quantize(weight, bits)
    wide = np.asarray(weight, np.float64).reshape(4, 32, 4)
    error = np.abs(np.asarray(dequantize(grouped, jnp.float32)).reshape(4, 32, 4) - wide)
    scales = np.asarray(grouped.scales, np.float64)[:, None]
    # Scales and leasts are float16: off by 2^-11 of themselves, 127 or 15 times, and a least once.
    rounding = 2.0**-11 * np.abs(wide).max(axis=1, keepdims=True) * 2
    assert (error <= scales / 2 + rounding + 1e-12).all()
    assert error.max() > 0


@pytest.mark.parametrize("multiply", [linear, linear_by_row])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_of_what_the_numbers_stand_for(multiply, bits, dtype):
    weight, rng = make_weight(70, 6), np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(3, 70)), dtype)
    got = multiply(quantize(jnp.asarray(weight), bits), x, jnp.float32)
    values = np.asarray(jnp.asarray(quantized_values(weight, bits)).astype(dtype), np.float64)
    rows = np.asarray(x, np.float64)
    limit = 2.0**-20 * (np.abs(rows) @ np.abs(values))
    assert (np.abs(np.asarray(got, np.float64) - rows @ values) <= limit).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_by_row_has_the_same_bits_among_any_number_of_rows(bits, dtype):
    multiply = jax.jit(lambda weight, x: linear_by_row(weight, x, jnp.float32))
    weight = quantize(jnp.asarray(make_weight(96, 160)), bits)
    x = jax.random.normal(jax.random.key(1), (512, 96)).astype(dtype)
    whole = np.asarray(multiply(weight, x))
    for num_rows in (1, 2, 7, 33, 200):
        np.testing.assert_array_equal(multiply(weight, x[:num_rows]), whole[:num_rows])


def make_rows(rng: np.random.Generator, F: int, *, has_leasts: bool) -> GroupedRows:
    stored, dtype = (32, np.uint8) if has_leasts else (64, np.int8)
    low, high = (0, 255) if has_leasts else (-128, 127)
    numbers = rng.integers(low, high, size=(F, stored), dtype=dtype, endpoint=True)
    scales, leasts = (rng.normal(size=(F, 2)).astype(np.float16) for _ in range(2))
    return GroupedRows(
        jnp.asarray(numbers), jnp.asarray(scales), jnp.asarray(leasts) if has_leasts else None
    )


@pytest.mark.parametrize("has_leasts", [False, True])
def test_stored_rows_are_joined_as_they_are(has_leasts):
    rng = np.random.default_rng(2)
    parts = [make_rows(rng, F, has_leasts=has_leasts) for F in (3, 5)]
    joined = join(parts)
    assert joined is not None
    values = [
        stored_values(
            np.asarray(part.numbers),
            np.asarray(part.scales),
            None if part.leasts is None else np.asarray(part.leasts),
        )
        for part in parts
    ]
    got = dequantize(transpose(joined), jnp.float32).T
    np.testing.assert_array_equal(got, np.concatenate(values))


def test_rows_of_two_kinds_do_not_join():
    rng = np.random.default_rng(3)
    assert join([make_rows(rng, 2, has_leasts=kind) for kind in (False, True)]) is None
