"""A layer's pages against plain NumPy arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.ops.kv_cache import copy_blocks, init_layer_kv, layer_kv_bytes, read_blocks, write_kv

pytestmark = pytest.mark.optimized

N, S, K, C = 7, 4, 2, 8
write, read, copy = jax.jit(write_kv), jax.jit(read_blocks), jax.jit(copy_blocks)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
platforms = pytest.mark.parametrize("platform_is_cpu", [True, False])


def random_kv(seed, dtype, num_tokens):
    k, v = np.random.default_rng(seed).normal(size=(2, num_tokens, K, C))
    return jnp.asarray(k, dtype), jnp.asarray(v, dtype)


@dtypes
@platforms
def test_new_pool_is_zero_and_as_large_as_told(dtype, platform_is_cpu):
    kv = init_layer_kv(N, S, K, C, dtype, platform_is_cpu)
    k, v = read(kv, jnp.arange(N))
    assert k.shape == v.shape == (N, S, K, C)
    assert k.dtype == v.dtype == dtype
    assert not k.any()
    assert not v.any()
    assert layer_kv_bytes(N, S, K, C, dtype) == kv.k.nbytes + kv.v.nbytes


def test_half_precision_is_stored_as_bits_on_a_cpu_only():
    assert init_layer_kv(N, S, K, C, "bfloat16", True).k.dtype == jnp.uint16
    assert init_layer_kv(N, S, K, C, "float16", True).k.dtype == jnp.uint16
    assert init_layer_kv(N, S, K, C, "bfloat16", False).k.dtype == jnp.bfloat16
    assert init_layer_kv(N, S, K, C, "float32", True).k.dtype == jnp.float32


def test_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="float64"):
        init_layer_kv(N, S, K, C, "float64", True)


@dtypes
@platforms
def test_written_tokens_are_read_back_and_nothing_else_changes(dtype, platform_is_cpu):
    kv = init_layer_kv(N, S, K, C, dtype, platform_is_cpu)
    k, v = random_kv(0, dtype, 5)
    slots = np.array([9, 27, 4, 0, 0])  # two padding tokens
    kv = write(kv, k, v, jnp.asarray(slots))
    for pool, new in zip(read(kv, jnp.arange(N)), (k, v), strict=True):
        expected = np.zeros((N * S, K, C), new.dtype)
        expected[slots[:3]] = new[:3]
        got = np.asarray(pool).reshape(N * S, K, C)
        np.testing.assert_array_equal(got[1:], expected[1:])


@dtypes
def test_special_values_survive_the_pool(dtype):
    values = np.resize(np.array([np.nan, np.inf, -np.inf, -0.0, 1e-6]), (1, K, C))
    x = jnp.asarray(values, dtype)
    kv = write(init_layer_kv(N, S, K, C, dtype, True), x, x, jnp.array([S]))
    k, v = read(kv, jnp.array([1]))
    assert np.asarray(k[0, 0]).tobytes() == np.asarray(v[0, 0]).tobytes() == np.asarray(x).tobytes()


def test_blocks_are_read_in_the_shape_of_their_ids():
    kv = init_layer_kv(N, S, K, C, "bfloat16", True)
    kv = write(kv, *random_kv(1, "bfloat16", N * S), jnp.arange(N * S))
    ids = jnp.array([[6, 0, 3], [3, 5, 1]])
    k, v = read(kv, ids)
    for got, pool in zip((k, v), read(kv, jnp.arange(N)), strict=True):
        assert got.shape == (2, 3, S, K, C)
        np.testing.assert_array_equal(got, pool[np.asarray(ids)])


@settings(max_examples=30)
@given(
    pairs=st.lists(
        st.tuples(st.integers(0, N - 1), st.integers(1, N - 1)),
        max_size=4,
        unique_by=lambda p: p[1],
    )
)
@dtypes
def test_copies_read_before_they_write(dtype, pairs):
    kv = init_layer_kv(N, S, K, C, dtype, True)
    kv = write(kv, *random_kv(2, dtype, N * S), jnp.arange(N * S))
    before = [np.asarray(x) for x in read(kv, jnp.arange(N))]
    src, dst = np.zeros((2, 4), np.int32)  # unused pairs copy the null block onto itself
    for i, pair in enumerate(pairs):
        src[i], dst[i] = pair
    after = read(copy(kv, jnp.asarray(src), jnp.asarray(dst)), jnp.arange(N))
    for got, old in zip(after, before, strict=True):
        expected = old.copy()
        expected[dst] = old[src]
        np.testing.assert_array_equal(got, expected)


@dtypes
def test_a_donated_pool_is_written_in_place(dtype):
    kv = init_layer_kv(256, 16, K, C, dtype, True)
    k, v = random_kv(3, dtype, 4)
    compiled = jax.jit(write_kv, donate_argnums=0).lower(kv, k, v, jnp.arange(4)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == kv.k.nbytes + kv.v.nbytes
    assert memory.temp_size_in_bytes < kv.k.nbytes / 4
