"""What is special to prefill: items of queries, ragged rows, results that no neighbour changes."""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_prefill as module
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.tiling import PrefillTiling
from tests.oracles import attention as oracle

pytestmark = pytest.mark.optimized  # bits matter

HUGE = 10**8  # a block id that is nowhere
BLOCK_SIZE, NUM_COLUMNS = 5, 20
H, K, C = 6, 2, 24
# 32 rows for 10 queries of 3 heads each: two rows of every item stay idle.
TILING = PrefillTiling(tile_q=32, tile_kv=16, num_warps=4, num_stages=2)
# (context_len, num_new) around the edges of items of 10 queries and tiles of 16 keys.
ROWS = ((100, 21), (17, 17), (1, 1), (0, 0), (64, 10), (33, 1), (0, 2), (16, 9), (95, 3))
NUM_TOKENS = 70  # 6 of them padding

attend = jax.jit(
    ft.partial(paged_prefill, interpret=True),
    static_argnames=("kv_dtype", "scale", "window", "soft_cap", "tiling"),
)


def draw(rows=ROWS, *, num_tokens=NUM_TOKENS, dtype="float32", window=None, seed=0):
    """The arguments by name, NumPy arrays: NaN wherever nobody looks, blocks that are not there."""
    rng = np.random.default_rng(seed)
    contexts, num_new = np.array(rows, np.int32).T
    num_blocks = len(rows) * NUM_COLUMNS
    k, v = np.full((2, num_blocks, BLOCK_SIZE, K, C), np.nan, np.float32)
    table = rng.permutation(num_blocks).reshape(len(rows), NUM_COLUMNS).astype(np.int32)
    for b, (context, n) in enumerate(rows):
        first = 0 if window is None else max(0, context - n - window + 1)
        position = np.arange(first, context)
        at = (table[b, position // BLOCK_SIZE], position % BLOCK_SIZE)
        for pool in (k, v):
            pool[at] = rng.normal(size=(len(position), K, C))
        table[b, : first // BLOCK_SIZE] = HUGE
        table[b, -(-context // BLOCK_SIZE) :] = HUGE
    return {
        "q": rng.normal(size=(num_tokens, H, C)).astype(dtype),
        "k": k.astype(dtype),
        "v": v.astype(dtype),
        "block_table": table,
        "context_lens": contexts,
        "query_start_loc": np.cumsum([0, *num_new], dtype=np.int32),
    }


def expect(case, **rule):
    case = case | {"block_table": np.where(case["block_table"] == HUGE, 0, case["block_table"])}
    names = ("q", "k", "v", "block_table", "context_lens", "query_start_loc")
    return oracle.paged_attention(*(case[name] for name in names), 0, **rule)


SINKS = np.linspace(-1, 4, H, dtype=np.float32)
RULES = {
    "plain": {"scale": 0.3},
    "all": {"scale": 0.5, "window": 37, "soft_cap": 2.0, "sinks": SINKS},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_ragged_rows_around_every_edge(rule):
    case = draw(window=rule.get("window"))
    got = np.asarray(attend(**case, kv_dtype="float32", tiling=TILING, **rule))
    np.testing.assert_allclose(got, expect(case, **rule), atol=2e-6)
    is_padding = np.arange(NUM_TOKENS) >= case["query_start_loc"][-1]
    assert not got[is_padding].any()  # written, if only by zeros
    start, end = case["query_start_loc"][6:8]
    assert end - start == 2
    assert not got[start:end].any()  # a row of context 0


def one_row(case, row, first, last):
    """The arguments for queries `first` to `last` of a row of ROWS, by position, and no others."""
    context, num_new = ROWS[row]
    start = case["query_start_loc"][row] - (context - num_new)
    num = last + 1 - first
    q = np.zeros((16, H, C), case["q"].dtype)
    q[:num] = case["q"][start + first : start + last + 1]
    return case | {
        "q": q[:1] if num == 1 else q,
        "block_table": case["block_table"][row : row + 1],
        "context_lens": np.array([last + 1], np.int32),
        "query_start_loc": np.array([0, num], np.int32),
    }


@pytest.mark.parametrize(("dtype", "rule"), [("float32", "all"), ("bfloat16", "plain")])
def test_a_query_has_the_same_bits_alone_in_a_chunk_and_in_a_crowd(dtype, rule):
    """With other keys read for its neighbours, at another place of its item, in another program."""
    rule = RULES[rule]
    case = draw(dtype=jnp.dtype(dtype), window=rule.get("window"))
    run = ft.partial(attend, kv_dtype=dtype, tiling=TILING, **rule)
    crowd = np.asarray(run(**case)).view(np.uint8)
    for row, chunks in {
        0: [(79, 79), (79, 92), (85, 85), (85, 99), (99, 99)],
        1: [(0, 0), (0, 9), (3, 3), (3, 16), (16, 16)],
        8: [(92, 92), (93, 94), (94, 94)],
    }.items():
        context, num_new = ROWS[row]
        start = case["query_start_loc"][row] - (context - num_new)
        for first, last in chunks:
            if last > first and dtype == "bfloat16":
                continue  # a program more, to show the same
            got = np.asarray(run(**one_row(case, row, first, last))).view(np.uint8)
            wanted = crowd[start + first : start + last + 1]
            np.testing.assert_array_equal(got[: last + 1 - first], wanted)


def test_other_tiles_of_keys_are_other_bits():
    """A control: sums in another order are not equal by themselves."""
    case = draw()
    wide = dataclasses.replace(TILING, tile_kv=32)
    got, wanted = (
        np.asarray(attend(**case, kv_dtype="float32", tiling=tiling, **RULES["plain"]))
        for tiling in (wide, TILING)
    )
    np.testing.assert_allclose(got, wanted, atol=2e-6)
    assert (got != wanted).any()


def test_items_hold_every_query_once_and_in_its_place():
    rng = np.random.default_rng(0)
    num_tokens, size = 40, 8
    cut = jax.jit(ft.partial(module._cut, num_tokens=num_tokens, size=size))
    for _ in range(50):
        num_new = rng.multinomial(rng.integers(num_tokens + 1), [0.5, 0.2, 0.1, 0.1, 0.05, 0.05])
        num_new[rng.integers(6)] = 0
        contexts = np.where(num_new > 0, num_new + rng.integers(0, 50, 6), 0)
        starts = np.cumsum([0, *num_new])
        items = cut(jnp.asarray(contexts, jnp.int32), jnp.asarray(starts, jnp.int32))
        row_of, position_of = np.full((2, num_tokens), -9)
        for row, start, position, num in zip(*map(np.asarray, items), strict=True):
            assert 0 <= num <= size
            assert (row_of[start : start + num] == -9).all()
            row_of[start : start + num] = row
            position_of[start : start + num] = position + np.arange(num)
        row = np.repeat(np.arange(6), num_new)
        np.testing.assert_array_equal(row_of[: starts[-1]], row)
        wanted = (contexts - num_new)[row] + np.arange(starts[-1]) - starts[row]
        np.testing.assert_array_equal(position_of[: starts[-1]], wanted)
        padding = position_of[starts[-1] :]
        assert (padding > -9 - num_tokens).all()
        assert (padding < 0).all()
        assert (row_of[starts[-1] :] >= 0).all()


def test_a_step_without_queries():
    case = draw(((7, 0), (0, 0)), num_tokens=0)
    assert attend(**case, kv_dtype="float32", scale=1.0).shape == (0, H, C)


def test_what_does_not_fit_is_refused_before_the_launch():
    case = draw(((7, 3),), num_tokens=4)
    run = ft.partial(paged_prefill, kv_dtype="float32", scale=1.0, interpret=True)
    with pytest.raises(ValueError, match=r"query_start_loc of shape \(1,\) must be \[2\]"):
        run(**case | {"query_start_loc": np.zeros(1, np.int32)})
    many_heads = case | {"q": np.zeros((4, 17 * K, C), np.float32)}
    small = PrefillTiling(tile_q=16, tile_kv=16, num_warps=4, num_stages=2)
    with pytest.raises(ValueError, match=r"tile_q=16 has no room .* 17 heads.* take 32 or more"):
        run(**many_heads, tiling=small)
    large = PrefillTiling(tile_q=512, tile_kv=256, num_warps=8, num_stages=5)
    with pytest.raises(ValueError, match=r"\d+ bytes of shared memory.*'cpu'.*166912.*tile_q"):
        run(**case, tiling=large)
