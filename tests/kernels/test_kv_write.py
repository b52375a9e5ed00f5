"""Keys and values written by the kernel against NumPy, to the bit: every number is exact in
float32, or a product with the inverse of a scale."""

import functools as ft
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import eight_bit
from pallas_kernels.checks import STORAGE
from pallas_kernels.kv_write import Pools, turn_and_write, write_kv
from tests.kernels import lowering
from tests.oracles import kv_write as oracle

FLOATS = ("float32", "bfloat16", "float16")
EIGHT_BIT = tuple(eight_bit.LARGEST)
N, S, T = 6, 4, 7


class Heads(NamedTuple):
    """Query heads, KV heads, dimensions, and pairs of them that RoPE turns."""

    H: int = 6
    K: int = 3
    C: int = 12
    X: int = 5


KINDS = [
    *((dtype, "none") for dtype in (*FLOATS, *EIGHT_BIT)),
    *((dtype, scales) for dtype in EIGHT_BIT for scales in ("tensor", "token_head")),
]


def storage(kv_dtype: str) -> np.dtype:
    return np.dtype(STORAGE[kv_dtype])


def make_pools(kv_dtype: str, scales: str, heads: Heads, num_blocks: int = N) -> Pools:
    """Pools full of ones: what is not written must stay."""
    shape = (num_blocks, S, heads.K, heads.C)
    k, v = (np.ones(shape, storage(kv_dtype)) for _ in range(2))
    if scales == "none":
        return Pools(k, v)
    if scales == "tensor":
        return Pools(k, v, np.float32(0.3), np.float32(0.07))
    return Pools(k, v, *(np.ones(shape[:3], np.float32) for _ in range(2)))


class New(NamedTuple):
    """A step's tokens."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


def make_new(dtype: str, heads: Heads, seed: int = 0) -> New:
    """Multiples of 1/8 and 1/16: what RoPE makes of them has no rounding in float32."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (rng.integers(-256, 257, (T, *shape)) / 8).astype(dtype)

    cos, sin = ((rng.integers(-16, 17, (T, heads.X)) / 16).astype(np.float32) for _ in range(2))
    return New(draw(heads.H, heads.C), draw(heads.K, heads.C), draw(heads.K, heads.C), cos, sin)


def draw_slots(rng: np.random.Generator) -> np.ndarray:
    """Slots of blocks in any order, and some padding: slots of the null block, alike or not."""
    slots = rng.permutation(np.arange(S, N * S))[:T]
    slots[rng.random(T) < 0.3] = rng.integers(0, S)
    return slots.astype(np.int32)


def expected(pools: Pools, k: np.ndarray, v: np.ndarray, slots: np.ndarray, kv_dtype: str) -> Pools:
    k_pool, k_scale = oracle.write(pools.k, pools.k_scale, k, slots, kv_dtype)
    v_pool, v_scale = oracle.write(pools.v, pools.v_scale, v, slots, kv_dtype)
    return Pools(k_pool, v_pool, k_scale, v_scale)


def assert_same(got: Pools, wanted: Pools) -> None:
    jax.tree.map(np.testing.assert_array_equal, Pools(*map(as_numpy, got)), wanted)


def as_numpy(x: jax.Array | None) -> np.ndarray | None:
    return None if x is None else np.asarray(x)


@ft.cache
def compiled(function, kv_dtype: str):
    return jax.jit(ft.partial(function, kv_dtype=kv_dtype, interpret=True))


@pytest.mark.parametrize(("kv_dtype", "scales"), KINDS)
def test_tokens_land_in_their_slots_and_nothing_else_changes(kv_dtype, scales):
    heads = Heads()
    rng = np.random.default_rng(1)
    pools = wanted = make_pools(kv_dtype, scales, heads)
    for seed in range(3):  # over each other: a slot's last token counts
        new, slots = make_new("float32", heads, seed), draw_slots(rng)
        wanted = expected(wanted, new.k, new.v, slots, kv_dtype)
        pools = compiled(write_kv, kv_dtype)(pools, new.k, new.v, slots)
    assert_same(pools, wanted)


@pytest.mark.parametrize(
    ("kv_dtype", "scales", "new_dtype", "heads"),
    [
        ("float32", "none", "float32", Heads()),
        ("float32", "none", "float32", Heads(H=4, K=4, C=16, X=8)),  # nothing padded
        ("bfloat16", "none", "bfloat16", Heads(H=2, K=1, C=80, X=40)),
        ("bfloat16", "none", "float32", Heads()),
        ("float8_e4m3fn", "token_head", "bfloat16", Heads()),
        ("float8_e5m2", "none", "float32", Heads()),
        ("int8", "token_head", "float32", Heads(H=8, K=2, C=8, X=4)),
        ("int8", "tensor", "float16", Heads()),
    ],
)
def test_keys_and_queries_are_turned_on_the_way(kv_dtype, scales, new_dtype, heads):
    pools, new = make_pools(kv_dtype, scales, heads), make_new(new_dtype, heads)
    slots = draw_slots(np.random.default_rng(2))
    q, got = compiled(turn_and_write, kv_dtype)(pools, *new, slots)
    turned = oracle.turn(new.k, new.cos, new.sin)
    assert_same(got, expected(pools, turned, new.v, slots, kv_dtype))
    np.testing.assert_array_equal(np.asarray(q), oracle.turn(new.q, new.cos, new.sin))
    assert q.dtype == new_dtype


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_heads_of_zeros_infinity_and_nan_get_scales_that_say_so(kv_dtype):
    heads = Heads()
    pools, new = make_pools(kv_dtype, "token_head", heads), make_new("float32", heads)
    k = new.k.copy()
    k[0, 0], k[0, 1, 3], k[0, 2, 5] = 0, np.inf, np.nan
    slots = np.arange(S, S + T, dtype=np.int32)
    got = compiled(write_kv, kv_dtype)(pools, k, new.v, slots)
    assert got.k_scale is not None
    assert 0 < got.k_scale[1, 0, 0] < 1e-30
    assert np.isinf(got.k_scale[1, 0, 1])
    assert np.isnan(got.k_scale[1, 0, 2])
    np.testing.assert_array_equal(got.k[1, 0, 0], 0)


@pytest.mark.parametrize(("kv_dtype", "scales"), KINDS)
def test_the_pools_are_written_in_place_on_a_gpu(kv_dtype, scales):
    """The kernel's results are its own operands, and those are the donated pools."""
    heads = Heads()
    pools, new = make_pools(kv_dtype, scales, heads), make_new("bfloat16", heads)
    write = ft.partial(turn_and_write, kv_dtype=kv_dtype)
    text = lowering.lower(write, pools, *new, np.zeros(T, np.int32), donated=(0,))
    num_written = 4 if scales == "token_head" else 2
    assert text.count("output_operand_alias<") == num_written
    num_donated = 2 if scales == "none" else 4  # scales for all tokens come out as they went in
    assert text.count("tf.aliasing_output") == num_donated


@pytest.mark.optimized
@pytest.mark.parametrize("function", [write_kv, turn_and_write])
def test_interpreted_too_it_holds_one_copy_of_the_pools(function):
    heads = Heads()
    pools, new = make_pools("float32", "none", heads, num_blocks=512), make_new("float32", heads)
    arguments = new if function is turn_and_write else (new.k, new.v)
    write = jax.jit(ft.partial(function, kv_dtype="float32", interpret=True), donate_argnums=0)
    memory = write.lower(pools, *arguments, np.zeros(T, np.int32)).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == pools.k.nbytes + pools.v.nbytes
    assert memory.temp_size_in_bytes < pools.k.nbytes / 4


def test_no_tokens_are_no_work():
    pools = make_pools("float32", "none", Heads())
    none = jnp.zeros((0, 3, 12), jnp.float32)
    slots = jnp.zeros(0, jnp.int32)
    assert write_kv(pools, none, none, slots, kv_dtype="float32") is pools


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_new": np.ones((T, 2, 12), np.float32)}, r"must be \[T K C\] = \[T 3 12\]"),
        ({"slot_mapping": np.zeros(T, np.int64)}, r"int64 \(7,\); it must be int32 \(7,\)"),
        ({"kv_dtype": "bfloat16"}, "stored as bfloat16, these are float32"),
        ({"kv_dtype": "float64"}, "choose one of"),
        ({"q": np.ones((T, 6, 8), np.float32)}, r"must be \[T H C\] = \[7 H 12\]"),
        ({"cos": np.ones((T, 7), np.float32)}, "X up to 6"),
    ],
)
def test_what_does_not_go_together_is_refused(change, message):
    heads = Heads()
    new = make_new("float32", heads)
    arguments = {
        "q": new.q,
        "k_new": new.k,
        "v_new": new.v,
        "cos": new.cos,
        "sin": new.sin,
        "slot_mapping": np.zeros(T, np.int32),
        "kv_dtype": "float32",
    }
    with pytest.raises(ValueError, match=message):
        turn_and_write(make_pools("float32", "none", heads), **(arguments | change))


def test_floats_have_no_scales():
    heads = Heads()
    pools = make_pools("float32", "none", heads)._replace(k_scale=np.float32(1))
    new = make_new("float32", heads)
    with pytest.raises(ValueError, match="8-bit pools may have one"):
        write_kv(pools, new.k, new.v, np.zeros(T, np.int32), kv_dtype="float32")
