"""Pools of 8 bits against plain NumPy arrays and the float8 types of ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jpaged.ops.kv_cache import (
    LARGEST,
    copy_blocks,
    init_layer_kv,
    kernel_pools,
    layer_kv_bytes,
    read_blocks,
    write_kv,
)

pytestmark = pytest.mark.optimized

N, S, K, C = 7, 4, 2, 8
STORED = {"int8": np.int8, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}
write, read, copy = jax.jit(write_kv), jax.jit(read_blocks), jax.jit(copy_blocks)
dtypes = pytest.mark.parametrize("dtype", STORED)
all_scales = pytest.mark.parametrize("scales", ["none", "tensor", "token_head"])


def rounded(x, dtype):
    """The nearest numbers that the type has, as float64."""
    top = 127 if dtype == "int8" else float(ml_dtypes.finfo(dtype).max)
    low = -128 if dtype == "int8" else -top
    x = np.clip(np.asarray(x, np.float32), low, top)
    if dtype == "int8":
        return np.round(x).astype(np.float64)
    return x.astype(np.dtype(dtype)).astype(np.float64)


def random_kv(seed, num_tokens, dtype="float32", spread=40.0):
    k, v = spread * np.random.default_rng(seed).normal(size=(2, num_tokens, K, C))
    return jnp.asarray(k, dtype), jnp.asarray(v, dtype)


def filled(dtype, scales, seed=1):
    kv = init_layer_kv(N, S, K, C, dtype, True, scales)
    return write(kv, *random_kv(seed, N * S), jnp.arange(N * S))


@dtypes
@all_scales
def test_new_pool_is_zero_and_as_large_as_told(dtype, scales):
    kv = init_layer_kv(N, S, K, C, dtype, True, scales)
    assert kv.k.dtype == kv.v.dtype == STORED[dtype]
    for x in read(kv, jnp.arange(N)):
        assert x.dtype == jnp.float32
        assert not x.any()
    total = sum(x.nbytes for x in jax.tree.leaves(kv))
    assert layer_kv_bytes(N, S, K, C, dtype, scales) == total


@pytest.mark.parametrize("make", [init_layer_kv, layer_kv_bytes])
def test_floats_of_16_bits_have_no_scales(make):
    with pytest.raises(ValueError, match="bfloat16 has no scales"):
        make(*(N, S, K, C, "bfloat16"), **_platform(make), scales="tensor")


def _platform(make):
    return {"platform_is_cpu": True} if make is init_layer_kv else {}


@dtypes
def test_without_scales_the_nearest_number_is_kept(dtype):
    kv = init_layer_kv(N, S, K, C, dtype, True)
    k, v = random_kv(0, 5, spread=300.0)  # some beyond the largest of int8 and e4m3
    slots = np.array([9, 27, 4, 0, 0])  # two padding tokens
    kv = write(kv, k, v, jnp.asarray(slots))
    for pool, new in zip(read(kv, jnp.arange(N)), (k, v), strict=True):
        expected = np.zeros((N * S, K, C))
        expected[slots[:3]] = rounded(new[:3], dtype)
        np.testing.assert_array_equal(pool.reshape(N * S, K, C)[1:], expected[1:])


@dtypes
def test_what_is_beyond_the_largest_number_becomes_it(dtype):
    x = jnp.asarray(np.resize([1e9, -1e9, np.inf, -np.inf], (1, K, C)), jnp.float32)
    kv = write(init_layer_kv(N, S, K, C, dtype, True), x, x, jnp.array([S]))
    expected = np.resize(rounded([1e9, -1e9, 1e9, -1e9], dtype), (K, C))
    for pool in read(kv, jnp.array([1])):
        np.testing.assert_array_equal(pool[0, 0], expected)


@dtypes
def test_a_scale_of_the_whole_tensor_is_given(dtype):
    kv = init_layer_kv(N, S, K, C, dtype, True, "tensor")
    kv = kv.replace(k_scale=jnp.float32(0.5), v_scale=jnp.float32(4.0))
    k, v = random_kv(3, S)
    kv = write(kv, k, v, jnp.arange(S, 2 * S))
    for pool, new, scale in zip(read(kv, jnp.array([1])), (k, v), (0.5, 4.0), strict=True):
        expected = scale * rounded(np.asarray(new) / scale, dtype)
        np.testing.assert_array_equal(pool[0], expected)


@dtypes
@pytest.mark.parametrize("given", ["float32", "bfloat16"])
def test_scales_per_token_and_head_come_from_their_largest_magnitude(dtype, given):
    kv = init_layer_kv(N, S, K, C, dtype, True, "token_head")
    k, v = random_kv(4, 3, given)
    k = k.at[1, 0].set(0)  # which must stay 0
    slots = jnp.array([5, 20, 4])
    kv = write(kv, k, v, slots)
    for pool, scale, new in ((kv.k, kv.k_scale, k), (kv.v, kv.v_scale, v)):
        peaks = np.abs(np.asarray(new, np.float64)).max(-1)
        got = np.asarray(scale).reshape(N * S, K)
        np.testing.assert_allclose(
            got[np.asarray(slots)], np.maximum(peaks, 1e-30) / LARGEST[dtype], rtol=1e-6
        )
        assert (np.delete(got, np.asarray(slots), 0) == 1).all()
        assert pool.dtype == STORED[dtype]
    # At the peak, 127, 448 and 57344, numbers lie 1, 32 and 8192 apart.
    share = {"int8": 1 / 254, "float8_e4m3fn": 1 / 28, "float8_e5m2": 1 / 14}[dtype]
    for pool, new in zip(read(kv, jnp.arange(N)), (k, v), strict=True):
        got = np.asarray(pool).reshape(N * S, K, C)[np.asarray(slots)]
        new = np.asarray(new, np.float64)
        peaks = np.abs(new).max(-1, keepdims=True)
        assert (np.abs(got - new) <= 1.001 * share * peaks).all()


@dtypes
def test_numbers_gone_wrong_are_seen_through_their_scale(dtype):
    k, v = random_kv(5, 2)
    k, v = k.at[0, 1, 3].set(jnp.nan), v.at[1, 0, 0].set(jnp.inf)
    kv = write(init_layer_kv(N, S, K, C, dtype, True, "token_head"), k, v, jnp.array([S, S + 1]))
    k_read, v_read = read(kv, jnp.array([1]))
    assert np.isnan(k_read[0, 0, 1]).all()
    assert not np.isfinite(v_read[0, 1, 0]).any()
    assert np.isfinite(k_read[0, 0, 0]).all()
    assert np.isfinite(v_read[0, 0]).all()


@dtypes
def test_numbers_and_scales_survive_one_more_write(dtype):
    """What was read, written again, is the same: rounding is done once."""
    kv = filled(dtype, "token_head")
    k, v = (x.reshape(N * S, K, C) for x in read(kv, jnp.arange(N)))
    again = write(init_layer_kv(N, S, K, C, dtype, True, "token_head"), k, v, jnp.arange(N * S))
    np.testing.assert_array_equal(again.k, kv.k)
    np.testing.assert_array_equal(again.v, kv.v)


@dtypes
@all_scales
def test_copies_take_scales_along(dtype, scales):
    kv = filled(dtype, scales)
    before = [np.asarray(x) for x in read(kv, jnp.arange(N))]
    src, dst = np.array([3, 5, 0, 0]), np.array([5, 1, 0, 0])
    for got, old in zip(
        read(copy(kv, jnp.asarray(src), jnp.asarray(dst)), jnp.arange(N)), before, strict=True
    ):
        expected = old.copy()
        expected[dst] = old[src]
        np.testing.assert_array_equal(got, expected)


@dtypes
@pytest.mark.parametrize("scales", ["none", "token_head"])
def test_a_donated_pool_is_written_in_place(dtype, scales):
    kv = init_layer_kv(256, 16, K, C, dtype, True, scales)
    new = random_kv(3, 4)
    compiled = jax.jit(write_kv, donate_argnums=0).lower(kv, *new, jnp.arange(4)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == layer_kv_bytes(256, 16, K, C, dtype, scales)
    assert memory.temp_size_in_bytes < kv.k.nbytes / 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", *STORED])
def test_kernels_see_numbers_and_bits_of_float8_alone(dtype):
    kv = init_layer_kv(N, S, K, C, dtype, True)
    seen = STORED.get(dtype, jnp.dtype(dtype))
    assert [pool.dtype for pool in kernel_pools(kv)] == [seen, seen]
