"""What is special to decoding: splits of a row's context, their merge, groups of any size."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import paged_decode as module
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.tiling import DecodeTiling
from tests.oracles import attention as oracle

HUGE = 10**8  # a block id that is nowhere
TILING = DecodeTiling(tile_kv=16, num_splits=1, num_warps=4, num_stages=2)
CONTEXTS = (0, 1, 15, 16, 17, 64, 79, 80)  # around the edges of tiles of 16 and blocks of 5
BLOCK_SIZE, NUM_COLUMNS = 5, 16


def draw(num_heads, num_kv_heads, head_dim, *, contexts=CONTEXTS, seed=0):
    """q, pools with NaN wherever nobody looks, and a table with blocks that are not there."""
    rng = np.random.default_rng(seed)
    B = len(contexts)
    num_blocks = B * NUM_COLUMNS
    q = rng.normal(size=(B, num_heads, head_dim)).astype(np.float32)
    pool_shape = (2, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
    k, v = np.full(pool_shape, np.nan, np.float32)
    table = rng.permutation(num_blocks).reshape(B, NUM_COLUMNS).astype(np.int32)
    for b, context in enumerate(contexts):
        position = np.arange(context)
        at = (table[b, position // BLOCK_SIZE], position % BLOCK_SIZE)
        for pool in (k, v):
            pool[at] = rng.normal(size=(context, num_kv_heads, head_dim))
        table[b, -(-context // BLOCK_SIZE) :] = HUGE
    return q, k, v, table, np.array(contexts, np.int32)


def expect(q, k, v, table, contexts, **rule):
    table = np.where(table == HUGE, 0, table)
    B = len(contexts)
    return oracle.paged_attention(q, k, v, table, contexts, np.arange(B + 1), B, **rule)


def decode(q, k, v, table, contexts, *, kv_dtype="float32", tiling=TILING, **rule):
    """Compiled, with the kernel interpreted."""

    def call(q, k, v, table, contexts):
        return paged_decode(
            q,
            k,
            v,
            block_table=table,
            context_lens=contexts,
            kv_dtype=kv_dtype,
            tiling=tiling,
            interpret=True,
            **rule,
        )

    return np.asarray(jax.jit(call)(q, k, v, table, contexts))


def as_8_bits(pool, kv_dtype):
    """The pool in 8 bits, spread over the type's range; NaN is NaN, or the largest integer."""
    if kv_dtype == "int8":
        return np.where(np.isnan(pool), 127, np.clip(np.round(pool * 40), -127, 127)).astype(
            np.int8
        )
    return (pool * 100).astype(getattr(ml_dtypes, kv_dtype))


def with_splits(num_splits):
    return dataclasses.replace(TILING, num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7])
def test_splits_of_any_number_find_what_one_finds(num_splits):
    # 7 splits of 5 tiles: some have nothing to do, and leave their part of the result undefined.
    case = draw(6, 2, 16)
    got = decode(*case, scale=0.3, tiling=with_splits(num_splits))
    np.testing.assert_allclose(got, expect(*case, scale=0.3), atol=2e-6)
    assert not got[0].any()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_windows_caps_and_sinks_hold_across_splits(num_splits):
    case = draw(6, 2, 16, seed=1)
    sinks = np.linspace(-1, 4, 6, dtype=np.float32)
    rule = {"scale": 0.5, "window": 37, "soft_cap": 2.0}
    got = decode(*case, sinks=jnp.asarray(sinks), tiling=with_splits(num_splits), **rule)
    np.testing.assert_allclose(got, expect(*case, sinks=sinks, **rule), atol=2e-6)
    assert not got[0].any()  # a row of context 0 has no keys, and a sink has no value


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(17, 1, 8), (2 * 71, 2, 4), (3, 3, 20)],  # 32 rows; 64 and 7 more; one of a padded width
)
def test_groups_of_any_size(num_heads, num_kv_heads, head_dim):
    case = draw(num_heads, num_kv_heads, head_dim, contexts=(0, 33, 6))
    got = decode(*case, scale=0.3, tiling=with_splits(2))
    np.testing.assert_allclose(got, expect(*case, scale=0.3), atol=2e-6)


def test_scores_that_differ_wildly_between_splits():
    # exp2 of what a split has found, taken by itself, would be 0 or infinite.
    q, k, v, table, contexts = draw(2, 1, 8, contexts=(80, 80), seed=2)
    q[0] *= 1000
    got = decode(q, k, v, table, contexts, scale=1.0, tiling=with_splits(5))
    want = expect(q, k, v, table, contexts, scale=1.0)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)  # scores of 3000 in float32


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "is_by_token"),
    [
        ("bfloat16", "float8_e4m3fn", True),
        ("bfloat16", "float8_e5m2", False),
        ("bfloat16", "int8", True),
        ("float32", "float8_e4m3fn", True),
    ],
)
def test_words_of_8_bits_and_numbers_beyond_float16(q_dtype, kv_dtype, is_by_token):
    # Read in words, padded: 20 of two numbers, or 20 of four.
    head_dim = 80 if is_by_token else 40
    q, *pools, table, contexts = draw(6, 2, head_dim, contexts=(0, 33, 7), seed=3)
    q = np.asarray(jnp.asarray(q * 1e6, q_dtype))
    codes = [as_8_bits(pool, kv_dtype) for pool in pools]
    rng = np.random.default_rng(4)
    shape = codes[0].shape[:3] if is_by_token else ()
    # Keys undo what queries have too much, and values are tiny.
    k_scale, v_scale = (rng.uniform(0.5, 1, shape).astype(np.float32) * x for x in (1e-6, 1e-9))
    k, v = (
        x.astype(np.float64) * scale[..., None]
        for x, scale in zip(codes, (k_scale, v_scale), strict=True)
    )
    scale = 0.3 / float(np.abs(codes[0].astype(np.float32)[np.isfinite(pools[0])]).std())
    got = decode(
        q,
        *(x.view(np.int8 if kv_dtype == "int8" else np.uint8) for x in codes),
        table,
        contexts,
        kv_dtype=kv_dtype,
        tiling=with_splits(2),
        scale=scale,
        k_scale=jnp.asarray(k_scale),
        v_scale=jnp.asarray(v_scale),
    ).astype(np.float64)
    want = expect(q.astype(np.float64), k, v, table, contexts, scale=scale)
    tolerance = 1e-2 if q_dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(got, want, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    ("q_dtype", "size"), [("float16", 1.0), ("bfloat16", 1e-12), ("bfloat16", 1e12)]
)
def test_scales_of_values_of_any_size_cost_no_precision(q_dtype, size, kv_dtype):
    # No more than the rounding of weights, and of the result, to the type of queries.
    q, *pools, table, contexts = draw(6, 2, 80, contexts=(0, 1, 2, 3, 33), seed=5)
    codes = [as_8_bits(pool, kv_dtype) for pool in pools]
    rng = np.random.default_rng(6)
    k_scale = np.full(codes[0].shape[:3], 0.01, np.float32)
    v_scale = (size * 10.0 ** rng.uniform(-4, -2, k_scale.shape)).astype(np.float32)
    q = np.asarray(jnp.asarray(q, q_dtype))
    got = decode(
        q,
        *(x.view(np.int8 if kv_dtype == "int8" else np.uint8) for x in codes),
        table,
        contexts,
        kv_dtype=kv_dtype,
        tiling=with_splits(2),
        scale=0.3,
        k_scale=jnp.asarray(k_scale),
        v_scale=jnp.asarray(v_scale),
    ).astype(np.float64)
    k, v = (
        x.astype(np.float64) * scale[..., None]
        for x, scale in zip(codes, (k_scale, v_scale), strict=True)
    )
    q = q.astype(np.float64)
    want, size_of_terms = (expect(q, k, x, table, contexts, scale=0.3) for x in (v, np.abs(v)))
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[q_dtype]
    bound = unit * (1.01 * np.abs(want) + size_of_terms) + 1e-30
    np.testing.assert_array_less(np.abs(got - want), bound)


@pytest.mark.parametrize("window", [None, 1, 16, 50])
@pytest.mark.parametrize("num_splits", [1, 2, 5, 40])
def test_splits_share_what_is_visible_evenly(window, num_splits):
    shape = module.AttentionShape(T=1, B=1, H=1, K=1, G=1, C=16, N=1, S=1, M=1)
    rule = module.Rule(1.0, window, None, "float32")
    work = module._Work(shape, rule, with_splits(num_splits), rows=16, width=16)
    contexts = np.arange(300, dtype=np.int32)
    ranges = [
        [np.asarray(x) for x in module._tiles_of(jnp.int32(split), jnp.asarray(contexts), work)]
        for split in range(num_splits)
    ]
    for context in contexts:
        taken = [list(range(begin[context], end[context])) for begin, end in ranges]
        first = 0 if window is None else max(0, context - window)
        visible = sorted({position // 16 for position in range(first, context)})
        assert list(itertools.chain(*taken)) == visible
        assert max(map(len, taken)) == -(-len(visible) // num_splits)


def test_a_merge_ignores_splits_without_keys():
    value = np.array([[[1.0, 3.0], [5.0, 7.0], [np.nan, np.nan]]], np.float32)[None]
    log_total = np.array([[[2.0, 1.0, module.LOWEST]]], np.float32)
    partials = module._Partials(jnp.asarray(value), jnp.asarray(log_total))
    want = (4 * value[0, 0, 0] + 2 * value[0, 0, 1]) / 6
    np.testing.assert_allclose(module._merge(partials, None)[0, 0], want, rtol=1e-6)
    sinks = jnp.full(1, np.log(2), jnp.float32)  # a weight of 2
    np.testing.assert_allclose(module._merge(partials, sinks)[0, 0], want * 6 / 8, rtol=1e-6)
    nothing = partials._replace(log_total=jnp.full((1, 1, 3), module.LOWEST, jnp.float32))
    assert not np.asarray(module._merge(nothing, sinks)).any()


def test_one_query_for_each_row():
    q, k, v, table, contexts = draw(2, 1, 8, contexts=(3, 4))
    with pytest.raises(ValueError, match="3 queries for 2 rows"):
        decode(np.concatenate([q, q[:1]]), k, v, table, contexts, scale=1.0)
    nobody = decode(q[:0], k, v, table[:0], contexts[:0], scale=1.0)
    assert nobody.shape == (0, 2, 8)


def test_a_tiling_too_large_is_refused_before_the_launch():
    q, k, v, table, contexts = draw(2, 1, 256, contexts=(3,))
    tiling = dataclasses.replace(TILING, tile_kv=128, num_stages=5)
    with pytest.raises(ValueError, match=r"\d+ bytes of shared memory.*'cpu'.*166912.*tile_kv"):
        decode(q, k, v, table, contexts, scale=1.0, tiling=tiling)
