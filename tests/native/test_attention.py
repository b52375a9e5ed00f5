"""The native form as part of other programs: vmap, derivatives, scans, numbers gone wrong."""

import functools as ft
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import functional as F
from jpaged.ops.paged_attention import paged_attention
from tests.models.test_model_config import LLAMA
from tests.native.kernels import FOLDER, load_or_skip
from tests.ops.test_paged_attention import make_case

RULE = {"scale": 0.3, "window": None, "soft_cap": None}


@pytest.fixture(autouse=True, scope="module")
def native_kernels():
    load_or_skip()


@pytest.fixture
def case():
    rows = [(40, 1), (17, 1), (33, 12)]
    return make_case(0, rows, num_decode_rows=2, num_tokens=16, block_size=8, table_width=6)[0]


def attend(case, q, implementation):
    return paged_attention(**(case | {"q": q}), **RULE, implementation=implementation)


def test_vmap_runs_each_member(case):
    q = jnp.stack([case["q"], -2 * case["q"]])
    got, wanted = (
        jax.jit(jax.vmap(ft.partial(attend, case, implementation=name)))(q)
        for name in ("native", "xla")
    )
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


def test_a_derivative_is_refused(case):
    def loss(q):
        return jnp.sum(attend(case, q, "native"))

    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(loss)(case["q"])


@pytest.mark.parametrize("scale", [0.0, -0.3, np.nan])
def test_a_scale_that_is_not_above_0_is_refused(case, scale):
    with pytest.raises(ValueError, match="must be above 0"):
        paged_attention(**case, **(RULE | {"scale": scale}), implementation="native")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_gone_wrong_are_not_hidden(case, bad):
    """One query's, which harms its own head alone."""
    q = case["q"].at[0, 0, 0].set(bad).at[5, 3, 1].set(bad)
    good, got = (
        np.asarray(jax.jit(ft.partial(attend, case, implementation="native"))(x))
        for x in (case["q"], q)
    )
    assert np.isnan(got[0, 0]).all()
    assert np.isnan(got[5, 3]).all()
    is_harmed = np.zeros(got.shape, bool)
    is_harmed[0, 0] = is_harmed[5, 3] = True
    np.testing.assert_array_equal(got[~is_harmed], good[~is_harmed])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [16, 24])  # 24: a segment of 256 ends within a block
def test_rows_with_a_common_prefix(dtype, block_size):
    """What neighbours share is read once for all of them; each has the bits that it has alone."""
    lengths = (700, 640, 300, 800, 520, 513, 30, 600)
    rows, num_rows = [(length, 1) for length in lengths], len(lengths)
    case, _ = make_case(
        *(1, rows),
        num_decode_rows=num_rows,
        num_tokens=num_rows,
        block_size=block_size,
        table_width=52,
        dtype=dtype,
    )
    table = np.array(case["block_table"])
    for row, length in enumerate(lengths[:6]):
        num_common = min(length, 512) // block_size
        table[row, :num_common] = table[0, :num_common]
    case["block_table"] = jnp.asarray(table)
    together, wanted = (
        np.asarray(attend(case, case["q"], name), np.float32) for name in ("native", "xla")
    )
    # The XLA form's weights are rounded where the native ones are, but are not the same numbers.
    tolerance = {"float32": 2e-5, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(together, wanted, atol=tolerance, rtol=tolerance)
    for row in range(num_rows):
        alone = case | {
            "block_table": case["block_table"][row : row + 1],
            "context_lens": case["context_lens"][row : row + 1],
            "query_start_loc": jnp.array([0, 1], jnp.int32),
            "num_decode_rows": 1,
        }
        got = attend(alone, case["q"][row : row + 1], "native")
        np.testing.assert_array_equal(np.asarray(got, np.float32)[0], together[row])


@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peaks_that_rise_along_the_context(dtype, soft_cap):
    """By little, for which sums stay, and by much, which has them decay; alone and in a prompt."""
    length, num_new = 330, 70
    case, _ = make_case(
        *(2, [(length, num_new)]),
        num_decode_rows=0,
        num_tokens=num_new,
        block_size=16,
        table_width=21,
        dtype=dtype,
    )
    # Position p's key is larger the later it comes, in steps below and above what is let be.
    size = jnp.array([1, 2, 3, 60, 62, 200], dtype)[jnp.arange(21 * 16) // 64 % 6]
    kv, blocks = case["kv"], case["block_table"][0]
    k = jax.lax.bitcast_convert_type(kv.k, jnp.dtype(dtype))
    k = k.at[blocks].multiply(size.reshape(21, 16, 1, 1))
    case["kv"] = replace(kv, k=jax.lax.bitcast_convert_type(k, kv.k.dtype))
    rule = RULE | {"soft_cap": soft_cap}
    got, wanted = (
        np.asarray(paged_attention(**case, **rule, implementation=name), np.float32)
        for name in ("native", "xla")
    )
    tolerance = {"float32": 1e-4, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(got, wanted, atol=tolerance, rtol=tolerance)
    for at in (0, 40, num_new - 1):
        alone = case | {
            "context_lens": jnp.array([length - num_new + at + 1], jnp.int32),
            "query_start_loc": jnp.array([0, 1], jnp.int32),
            "num_decode_rows": 1,
            "q": case["q"][at : at + 1],
        }
        one = paged_attention(**alone, **rule, implementation="native")
        np.testing.assert_array_equal(np.asarray(one, np.float32)[0], got[at])


def test_generate_says_the_same_natively():
    F.load_native(FOLDER)
    config = F.ModelConfig.from_hf(LLAMA)
    params = F.init_params(config, jax.random.key(0), "float32")
    prompts, lengths = jnp.arange(18).reshape(2, 9), jnp.array([9, 5])
    keys = jax.random.split(jax.random.key(1), 2)
    run = jax.jit(
        ft.partial(F.generate, config=config, max_new_tokens=6),
        static_argnames="implementation",
    )
    native, xla = (run(params, prompts, lengths, keys, implementation=n) for n in ("native", "xla"))
    np.testing.assert_array_equal(native.token_ids, xla.token_ids)
    np.testing.assert_allclose(native.logprobs, xla.logprobs, atol=1e-4)
