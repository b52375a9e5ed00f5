"""Blocks copied by the kernel against NumPy: all reads before all writes, in place."""

import functools as ft

import jax
import numpy as np
import pytest

from pallas_kernels.block_copy import block_copy
from tests.kernels import lowering

N, S, W = 9, 3, 5
SHAPES = {"k": (N, S, 3, 12), "v": (N, S, 3, 12), "scale": (N, S, 3)}


def make_pools(num_blocks: int = N) -> tuple[np.ndarray, ...]:
    """8-bit keys, half-precision values and scales; the types are the caller's business."""
    rng = np.random.default_rng(0)
    dtypes = {"k": np.uint8, "v": np.float16, "scale": np.float32}
    return tuple(
        rng.integers(0, 200, (num_blocks, *SHAPES[name][1:])).astype(dtype)
        for name, dtype in dtypes.items()
    )


def copied(pool: np.ndarray, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
    out = pool.copy()
    for source, target in zip(src, dst, strict=True):
        out[target] = pool[source]
    return out


@pytest.fixture(scope="module")
def copy():
    return jax.jit(ft.partial(block_copy, interpret=True))


def check(copy, src: list[int] | np.ndarray, dst: list[int] | np.ndarray) -> None:
    pools = make_pools()
    src, dst = np.array(src, np.int32), np.array(dst, np.int32)
    for got, pool in zip(copy(pools, src, dst), pools, strict=True):
        np.testing.assert_array_equal(np.asarray(got), copied(pool, src, dst))


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([1, 2, 0, 0, 0], [3, 4, 0, 0, 0]),  # padding names the null block
        ([1, 1, 1, 1, 1], [2, 3, 4, 5, 6]),  # one block read by all
        ([1, 2, 3, 4, 5], [2, 3, 4, 5, 6]),  # a chain
        ([1, 2, 3, 0, 0], [2, 3, 1, 0, 0]),  # a cycle
        ([7, 7, 0, 8, 0], [7, 8, 0, 1, 0]),  # one over itself, then elsewhere
        ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
    ],
)
def test_all_reads_come_before_all_writes(copy, src, dst):
    check(copy, src, dst)


def test_drawn_copies(copy):
    rng = np.random.default_rng(1)
    for _ in range(30):
        dst = rng.permutation(np.arange(1, N))[:W]
        src = rng.integers(1, N, W)
        is_padding = rng.random(W) < 0.3
        check(copy, np.where(is_padding, 0, src), np.where(is_padding, 0, dst))


def test_the_pools_are_written_in_place_on_a_gpu():
    ids = np.zeros(W, np.int32)
    text = lowering.lower(block_copy, make_pools(), ids, ids, donated=(0,))
    assert text.count("output_operand_alias<") == 3
    assert text.count("tf.aliasing_output") == 3


@pytest.mark.optimized
def test_interpreted_too_it_holds_one_copy_of_the_pools():
    pools, ids = make_pools(1024), np.zeros(W, np.int32)
    copy = jax.jit(ft.partial(block_copy, interpret=True), donate_argnums=0)
    memory = copy.lower(pools, ids, ids).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == sum(pool.nbytes for pool in pools)
    assert memory.temp_size_in_bytes < pools[0].nbytes / 4


def test_no_copies_are_no_work():
    pools, ids = make_pools(), np.zeros(0, np.int32)
    assert block_copy(pools, ids, ids) is pools


@pytest.mark.parametrize(
    ("pools", "ids", "message"),
    [
        ((np.ones((4, 2), np.int8),), np.zeros(2, np.int32), r"must be \[N S K C\] or \[N S K\]"),
        ((), np.zeros(2, np.int32), "pools must be"),
        (make_pools(), np.zeros(2, np.int64), r"both must be int32 \[W\]"),
    ],
)
def test_what_does_not_go_together_is_refused(pools, ids, message):
    with pytest.raises(ValueError, match=message):
        block_copy(pools, ids, ids)
