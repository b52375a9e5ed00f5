"""RMS norms against their definition in float64, their rounding, and their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.ops.norm import offset_rms_norm, rms_norm

pytestmark = pytest.mark.optimized

EPS = 1e-3


@pytest.mark.parametrize("row_invariant", [False, True])
@pytest.mark.parametrize("shape", [(5, 48), (3, 4, 12)])
@pytest.mark.parametrize(("norm", "offset"), [(rms_norm, 0.0), (offset_rms_norm, 1.0)])
def test_norm_is_its_definition(norm, offset: float, shape: tuple[int, ...], row_invariant: bool):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=shape), rng.normal(size=shape[-1])
    want = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * (offset + weight)
    x32, weight32 = jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32)
    got = norm(x32, weight32, eps=EPS, row_invariant=row_invariant)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_llama_rounds_before_the_weight_and_gemma_after():
    x, weight = jax.random.normal(jax.random.key(0), (2, 64)).astype(jnp.bfloat16)
    x32, weight32 = np.asarray(x, np.float32), np.asarray(weight, np.float32)
    normalized = jnp.asarray(x32 / np.sqrt(np.mean(x32**2)))
    llama = normalized.astype(jnp.bfloat16) * weight
    gemma = (normalized * (1 + weight32)).astype(jnp.bfloat16)
    assert jnp.any(llama != (normalized * weight32).astype(jnp.bfloat16))  # the order shows
    np.testing.assert_array_equal(rms_norm(x, weight, eps=0.0, row_invariant=False), llama)
    np.testing.assert_array_equal(offset_rms_norm(x, weight, eps=0.0, row_invariant=False), gemma)


@pytest.mark.parametrize("shape", [(12,), (64,), (4, 12)])
def test_row_invariant_norm_has_the_same_bits_among_any_number_of_rows(shape: tuple[int, ...]):
    norm = jax.jit(lambda x: rms_norm(x, jnp.ones(shape[-1]), eps=EPS, row_invariant=True))
    x = np.random.default_rng(0).normal(size=(1024, *shape)).astype(np.float32)
    whole = np.asarray(norm(x))
    for num_rows in (1, 2, 7, 64, 333):
        np.testing.assert_array_equal(norm(x[:num_rows]), whole[:num_rows])


def test_the_plain_norm_does_not():
    norm = jax.jit(lambda x: rms_norm(x, jnp.ones(12), eps=EPS, row_invariant=False))
    x = jax.random.normal(jax.random.key(0), (1024, 12))
    assert np.any(np.asarray(norm(x[:64])) != np.asarray(norm(x))[:64])
