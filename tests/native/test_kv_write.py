"""Heads taken in C++ against the XLA form: norms, RoPE, and what lies in which slot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.ops.heads import Heads
from jpaged.ops.kv_cache import LayerKV, init_layer_kv, read_blocks, take_heads
from jpaged.ops.norm import RMSNorm
from tests.native.kernels import load_or_skip

DTYPES = ("float32", "bfloat16", "float16")
N, S, H, K = 9, 4, 6, 2
PADDING = 3  # tokens at the end that belong to nobody


@pytest.fixture(scope="module", autouse=True)
def kernels():
    load_or_skip()


def draw_heads(dtype: str, T: int, C: int, X: int | None, norm: str) -> Heads:
    """X: None for no angles. norm: none, llama or gemma."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    def rule() -> RMSNorm | None:
        if norm == "none":
            return None
        return RMSNorm(draw(C).astype(dtype), 1e-5, is_offset=norm == "gemma")

    turns = draw(T, X or 0) * 3
    return Heads(
        (draw(T, H + 2 * K, C) * 2).astype(dtype),
        K,
        q_norm=rule(),
        k_norm=rule(),
        angles=None if X is None else (jnp.cos(turns), jnp.sin(turns)),
    )


def slots_of(T: int) -> jax.Array:
    """Slots here and there but in the null block, which is padding's."""
    slots = np.random.default_rng(1).permutation(np.arange(S, N * S))[:T]
    slots[T - PADDING :] = 0
    return jnp.asarray(slots, jnp.int32)


def native(kv: LayerKV) -> LayerKV:
    return kv.replace(implementation="native")


def marked(kv_dtype: str, C: int) -> LayerKV:
    """A pool that is not empty: what stays can be seen."""
    kv = init_layer_kv(N, S, K, C, kv_dtype, True)
    return jax.tree.map(lambda pool: pool + jnp.asarray(7, pool.dtype), kv)


CASES = [
    # tokens, head dimension, pairs that turn, norm: whole vectors and not
    (20, 64, 32, "none"),
    (20, 64, 8, "gemma"),
    (5, 12, 5, "llama"),
    (7, 80, 40, "llama"),
    (9, 20, None, "gemma"),
    (9, 33, None, "none"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_heads_are_taken_as_xla_takes_them(dtype, case):
    T, C, X, norm = case
    heads, slots = draw_heads(dtype, T, C, X, norm), slots_of(T)
    # Pools are in the model's dtype, or in float32.
    kv = marked("float32" if norm == "none" else dtype, C)
    want_q, want = take_heads(kv, heads, slots)
    got_q, got = jax.jit(take_heads)(native(kv), heads, slots)
    last_bit = float(jnp.finfo(dtype).eps)
    # What is turned is a difference of two; either form may round a bit aside, and once more.
    assert_close(got_q, want_q, 4 * last_bit)
    blocks = jnp.arange(1, N)
    for one, other in zip(read_blocks(got, blocks), read_blocks(want, blocks), strict=True):
        assert_close(one, other, 4 * last_bit)
    assert got_q.dtype == want_q.dtype
    written = np.unique(np.asarray(slots))[1:]
    for new, old in ((got.k, kv.k), (got.v, kv.v)):
        same = np.asarray(new == old).reshape(N * S, -1).all(axis=1)
        assert not same[written].any()
        assert np.delete(same, written).all()


def assert_close(got: jax.Array, want: jax.Array, tolerance: float) -> None:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    peaks = np.abs(want).max(axis=-1, keepdims=True)
    assert (np.abs(got - want) <= tolerance * peaks).all()


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_kept_as_they_are_in_any_pool(dtype, kv_dtype):
    """Not normalized, not turned, rounded as a cast rounds."""
    T, C = 6, 20
    heads, slots = draw_heads(dtype, T, C, 10, "llama"), slots_of(T)
    _, kv = take_heads(native(marked(kv_dtype, C)), heads, slots)
    _, values = read_blocks(kv, jnp.arange(N))
    own = values.reshape(N * S, K, C)[slots[: T - PADDING]]
    np.testing.assert_array_equal(own, heads.normalized()[2][: T - PADDING].astype(kv_dtype))


def test_a_token_has_the_same_bits_in_any_company():
    """600 tokens go to several threads, one to one."""
    C = 64
    heads = draw_heads("bfloat16", 600, C, 32, "llama")
    kv = init_layer_kv(700, S, K, C, "bfloat16", True, implementation="native")
    slots = jnp.arange(S, S + 600, dtype=jnp.int32)
    q, together = take_heads(kv, heads, slots)
    for t in (0, 311, 599):
        one = jax.tree.map(lambda x: x[t : t + 1] if x.shape[0] == 600 else x, heads)  # noqa: B023
        q_alone, alone = take_heads(kv, one, slots[t : t + 1])
        np.testing.assert_array_equal(q[t], q_alone[0])
        block, place = int(slots[t]) // S, int(slots[t]) % S
        np.testing.assert_array_equal(alone.k[block, place], together.k[block, place])


def test_weights_of_another_dtype_normalize_as_well():
    heads, slots = draw_heads("bfloat16", 8, 16, 8, "gemma"), slots_of(8)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (heads.q_norm, heads.k_norm))
    mixed = heads.replace(q_norm=wide[0], k_norm=wide[1])
    kv = marked("float32", 16)
    want, _ = take_heads(kv, mixed, slots)
    got, _ = take_heads(native(kv), mixed, slots)
    assert_close(got, want, 2.0**-6)


def test_pools_are_written_in_place():
    """A donated pool comes back as the same memory, in a loop too."""
    heads, slots = draw_heads("bfloat16", 8, 16, 8, "none"), slots_of(8)
    kv = init_layer_kv(5000, S, K, 16, "bfloat16", True, implementation="native")
    bytes_of_pools = kv.k.nbytes + kv.v.nbytes

    def steps(kv: LayerKV, heads: Heads, slots: jax.Array) -> tuple[LayerKV, jax.Array]:
        def step(_, carry):
            kv, total = carry
            q, kv = take_heads(kv, heads, slots)
            return kv, total + jnp.sum(q.astype(jnp.float32))

        return jax.lax.fori_loop(0, 3, step, (kv, jnp.float32(0)))

    compiled = jax.jit(steps, donate_argnums=0).lower(kv, heads, slots).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < bytes_of_pools // 10
    assert compiled.memory_analysis().alias_size_in_bytes >= bytes_of_pools
