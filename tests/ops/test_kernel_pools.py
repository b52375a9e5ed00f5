"""Pools that kernels write and copy hold what XLA's hold, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.ops.heads import Heads
from jpaged.ops.kv_cache import (
    LayerKV,
    copy_blocks,
    init_layer_kv,
    kernel_pools,
    take_heads,
    write_kv,
)
from jpaged.ops.rope import apply_rope

N, S, K, C, T, H, X = 5, 4, 3, 12, 6, 6, 5
SLOTS = np.array([4, 9, 17, 5, 0, 1], np.int32)  # the last two are padding
FORMATS = [("bfloat16", "none"), ("float8_e4m3fn", "token_head"), ("int8", "tensor")]
write, copy = jax.jit(write_kv), jax.jit(copy_blocks)


def both(dtype: str, scales) -> tuple[LayerKV, LayerKV]:
    """An empty pool of XLA's, and one for kernels."""
    shape = (N, S, K, C)
    return tuple(
        init_layer_kv(*shape, dtype, True, scales, implementation=implementation)
        for implementation in ("xla", "pallas")
    )


def draw(dtype: str, *shape: int) -> jax.Array:
    """Multiples of 1/8: what RoPE makes of them has no rounding in float32."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(-64, 65, shape) / 8, dtype)


def blocks(kv: LayerKV) -> list[np.ndarray]:
    """All that is kept of blocks, but the null block's."""
    k, v = kernel_pools(kv)
    kept = [k, v, kv.k_scale, kv.v_scale]
    return [np.asarray(x)[1:] for x in kept if x is not None and x.ndim]


def assert_same(kv: LayerKV, other: LayerKV) -> None:
    for one, two in zip(blocks(kv), blocks(other), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(("dtype", "scales"), FORMATS)
def test_what_is_written_and_copied_is_what_xla_writes_and_copies(dtype, scales):
    k, v = draw("float32", T, K, C), draw("float32", T, K, C)
    xla, pallas = (write(kv, k, v, SLOTS) for kv in both(dtype, scales))
    assert_same(pallas, xla)
    src, dst = np.array([1, 2, 0], np.int32), np.array([2, 3, 0], np.int32)
    xla, pallas = (copy(kv, src, dst) for kv in (xla, pallas))
    assert_same(pallas, xla)
    assert np.any(blocks(pallas)[0][2])
    assert pallas.implementation == "pallas"


def test_rope_on_the_way_is_rope_before():
    q, k = draw("bfloat16", T, H, C), draw("bfloat16", T, K, C)
    cos, sin = (x / 16 for x in (draw("float32", T, X), draw("float32", T, X)))
    xla, pallas = both("bfloat16", "none")
    heads = Heads(jnp.concatenate([q, k, k], axis=1), K, angles=(cos, sin))
    turned, pallas = jax.jit(take_heads)(pallas, heads, SLOTS)
    assert_same(pallas, write(xla, apply_rope(k, cos, sin), k, SLOTS))
    np.testing.assert_array_equal(np.asarray(turned), np.asarray(apply_rope(q, cos, sin)))


@pytest.mark.parametrize(
    ("dtype", "storage"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), ("float8_e5m2", "uint8")],
)
def test_pools_for_kernels_are_no_bits_of_halves(dtype, storage):
    assert init_layer_kv(N, S, K, C, dtype, True, implementation="pallas").k.dtype == storage
