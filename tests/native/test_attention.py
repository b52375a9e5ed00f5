"""The native form as part of other programs: vmap, derivatives, scans, numbers gone wrong."""

import functools as ft

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
