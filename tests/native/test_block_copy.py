"""Blocks copied in C++ against the XLA form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.ops.kv_cache import LayerKV, copy_blocks, init_layer_kv
from tests.native.kernels import load_or_skip

N, S, K = 9, 4, 2


@pytest.fixture(scope="module", autouse=True)
def kernels():
    load_or_skip()


@pytest.mark.parametrize(("kv_dtype", "scales"), [("bfloat16", "none"), ("int8", "token_head")])
def test_blocks_are_copied_as_xla_copies_them(kv_dtype, scales):
    """A block that is read and written, one copied twice, padding, a block over itself."""
    rng = np.random.default_rng(3)
    kv = init_layer_kv(N, S, K, 5, kv_dtype, True, scales)
    kv = jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 99, x.shape), x.dtype), kv)
    src, dst = jnp.array([1, 2, 2, 0, 7, 0]), jnp.array([2, 3, 4, 0, 7, 0])
    want, got = (
        copy_blocks(kv, src, dst),
        jax.jit(copy_blocks)(kv.replace(implementation="native"), src, dst),
    )
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)


def test_blocks_are_copied_in_place_where_a_branch_may_not_be_taken():
    kv = init_layer_kv(5000, S, K, 16, "bfloat16", True, implementation="native")
    bytes_of_pools = kv.k.nbytes + kv.v.nbytes

    def maybe(kv: LayerKV, src: jax.Array, dst: jax.Array) -> LayerKV:
        copy = lambda kv: copy_blocks(kv, src, dst)  # noqa: E731
        return jax.lax.cond(jnp.any(src != dst), copy, lambda kv: kv, kv)

    ids = jnp.zeros(3, jnp.int32)
    compiled = jax.jit(maybe, donate_argnums=0).lower(kv, ids, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < bytes_of_pools // 10
