"""Codes of 8-bit floats against ml_dtypes: all of them, and lowered for CUDA in a kernel."""

import functools as ft

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import float8
from tests.kernels import lowering

pytestmark = pytest.mark.optimized  # the optimizer must not touch an exact trick

KINDS = ("float8_e4m3fn", "float8_e5m2")
CODES = np.arange(256, dtype=np.uint8)


def numbers_of(kind: str) -> np.ndarray:
    return CODES.view(getattr(ml_dtypes, kind)).astype(np.float32)


def saturated(x: np.ndarray, kind: str) -> np.ndarray:
    """The codes ml_dtypes gives, once what is too large is the largest number there is."""
    largest = float(ml_dtypes.finfo(kind).max)
    return np.clip(x, -largest, largest).astype(getattr(ml_dtypes, kind)).view(np.uint8)


def edge_numbers(kind: str) -> np.ndarray:
    """Every number of the kind, the middle between neighbours, and what is just beside both."""
    numbers = np.unique(numbers_of(kind)[np.isfinite(numbers_of(kind))])
    middles = (numbers[1:] + numbers[:-1]) / 2
    exact = np.concatenate([numbers, middles]).astype(np.float32)
    beside = [np.nextafter(exact, np.float32(way)) for way in (-np.inf, np.inf)]
    special = [0.0, -0.0, np.inf, -np.inf, 1e-45, 1e-38, 3e38, 465.0, 6e4, -1e5]
    return np.concatenate([exact, *beside, np.array(special, np.float32)])


def random_numbers(rng: np.random.Generator, num: int) -> np.ndarray:
    """Half from all the bit patterns of float32, half of a size that the kinds can hold."""
    patterns = rng.integers(0, 2**32, num // 2, dtype=np.uint32).view(np.float32)
    sized = rng.normal(size=num - num // 2) * 2.0 ** rng.integers(-18, 18, num - num // 2)
    return np.concatenate([patterns, sized.astype(np.float32)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_every_code_is_decoded_exactly(kind, dtype):
    got = np.asarray(float8.decode(jnp.asarray(CODES), kind, dtype))
    assert got.dtype == dtype
    got = got.astype(np.float32)
    np.testing.assert_array_equal(got, numbers_of(kind))  # NaN where NaN is
    finite = np.isfinite(got)
    np.testing.assert_array_equal(np.signbit(got)[finite], np.signbit(numbers_of(kind))[finite])


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_rounded_to_the_nearest_even_and_saturate(kind):
    rng = np.random.default_rng(0)
    x = np.concatenate([edge_numbers(kind), random_numbers(rng, 400_000)])
    x = x[~np.isnan(x)]
    got = np.asarray(float8.encode(jnp.asarray(x), kind))
    np.testing.assert_array_equal(got, saturated(x, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_survives_and_nan_stays_nan(kind):
    numbers = numbers_of(kind)
    finite = np.isfinite(numbers)
    got = np.asarray(float8.encode(jnp.asarray(numbers), kind))
    np.testing.assert_array_equal(got[finite], CODES[finite])
    nan = np.array([np.nan, -np.nan], np.float32)
    got = np.asarray(float8.decode(float8.encode(jnp.asarray(nan), kind), kind, jnp.float32))
    assert np.isnan(got).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_number_is_what_the_format_says(kind):
    assert float8.MAX[kind] == float(ml_dtypes.finfo(kind).max)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="choose one of float8_e4m3fn, float8_e5m2"):
        float8.encode(jnp.zeros(1, jnp.float32), "float8_e8m0fnu")
    with pytest.raises(ValueError, match="choose one of"):
        float8.decode(jnp.zeros(1, jnp.uint8), "int8")


def _recode(codes_ref, out_ref, *, kind: str, dtype: str):
    numbers = float8.decode(codes_ref[...], kind, dtype)
    out_ref[...] = float8.encode(numbers.astype(jnp.float32), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_both_ways_work_inside_a_kernel(kind, dtype):
    def recode(codes: jax.Array, interpret: bool) -> jax.Array:
        return pl.pallas_call(
            ft.partial(_recode, kind=kind, dtype=dtype),
            out_shape=jax.ShapeDtypeStruct((256,), jnp.uint8),
            compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
        )(codes)

    got = np.asarray(jax.jit(recode, static_argnums=1)(jnp.asarray(CODES), True))
    finite = np.isfinite(numbers_of(kind))
    np.testing.assert_array_equal(got[finite], CODES[finite])
    compiled = ft.partial(recode, interpret=False)
    assert "triton" in lowering.lower(compiled, jax.ShapeDtypeStruct((256,), jnp.uint8))
