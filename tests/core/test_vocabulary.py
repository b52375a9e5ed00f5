"""The likeliest ids of a row, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.core.vocabulary import top_logprobs

pytestmark = pytest.mark.optimized

_top = jax.jit(top_logprobs, static_argnames="k")


@pytest.mark.parametrize(("vocab_size", "k"), [(1, 1), (50, 50), (1000, 12), (5000, 96)])
def test_the_likeliest_ids_and_their_log_probabilities(vocab_size, k):
    logits = np.random.default_rng(k).normal(0, 3, (5, vocab_size)).astype(np.float32)
    logprobs, ids = _top(logits, k=k)
    exact = logits.astype(np.float64)
    exact -= np.log(np.sum(np.exp(exact), axis=1, keepdims=True))
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1, kind="stable")[:, :k])
    np.testing.assert_allclose(logprobs, -np.sort(-exact, axis=1)[:, :k], atol=2e-6, rtol=1e-6)


def test_ties_go_to_the_lower_id():
    _, ids = _top(jnp.zeros((2, 300)), k=7)
    np.testing.assert_array_equal(ids, np.tile(np.arange(7), (2, 1)))


def test_ids_that_can_not_be_come_last_and_in_the_vocabulary():
    logits = jnp.full((1, 70), -jnp.inf).at[0, 66].set(1.0)
    logprobs, ids = _top(logits, k=5)
    assert ids[0, 0] == 66
    assert logprobs[0].tolist() == [0.0] + [-np.inf] * 4
    assert (ids < 70).all()


def test_bits_do_not_depend_on_the_batch():
    logits = jax.random.normal(jax.random.key(0), (40, 3000))
    whole, _ = _top(logits, k=9)
    for size in (1, 2, 7):
        np.testing.assert_array_equal(_top(logits[:size], k=9)[0], whole[:size])
