"""Rules on logits in `jpaged.functional`: those of `LLM`, and judged when they are made."""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

from jpaged import functional as F
from tests.test_functional import (
    CONFIG,
    NUM_SAMPLES,
    RANDOM,
    as_arrays,
    generate,
    llm_outputs,
    make_params,
    make_state,
)

SIZES = F.RuleSizes(CONFIG.vocab_size, num_biases=4, num_bad_words=2, bad_word_len=2)
COOL = F.LogitsProcessor("cool", lambda logits, *_: logits, default=10**6)
PENALTIES = {"repetition_penalty": 1.7, "frequency_penalty": 0.4, "presence_penalty": -0.3}


def test_rules_are_those_of_llm():
    allowed, bias = list(range(3, 90, 2)), {5: 2.0, 61: -3.0}
    is_allowed = jnp.zeros((3, CONFIG.vocab_size), bool).at[:, jnp.array(allowed)].set(True)
    rules = F.make_rules(
        3,
        SIZES,
        is_allowed=is_allowed,
        bias_ids=jnp.array([*bias, -1, -1]),
        bias=jnp.array([*bias.values(), 0.0, 0.0]),
        **PENALTIES,
    )
    arrays = as_arrays(RANDOM)
    result = jax.jit(ft.partial(generate, rules=rules))(make_params(), None, sampling=arrays)
    wanted = llm_outputs(
        RANDOM, NUM_SAMPLES, allowed_token_ids=allowed, logit_bias=bias, **PENALTIES
    )
    for row, want in enumerate(wanted):
        length = int(result.lengths[row])
        assert result.token_ids[row, :length].tolist() == want.token_ids
    assert not result.status.any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 1.0}, "'temperature' is no field of LogitsRules"),
        ({"presence_penalty": jnp.zeros(2)}, r"presence_penalty has shape \(2,\), and \(3,\)"),
        ({"hold_ids": jnp.zeros((2, 1))}, r"hold_ids has shape \(2, "),
        ({"bias_ids": list(range(SIZES.num_biases + 1))}, "bias_ids has shape"),
        ({"is_allowed": jnp.ones((1, SIZES.vocab_size), bool)}, "a row for each prompt"),
        ({"is_allowed": jnp.ones((3, SIZES.vocab_size + 1), bool)}, "an entry for each id"),
        ({"processor_params": {"fan": 1}}, r"'fan' is none of the processors \['cool'\]"),
        ({"processor_params": {"cool": [1, 2]}}, r"a parameter of 'cool' has shape \(2,\)"),
    ],
)
def test_wrong_rules_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        F.make_rules(3, SIZES, processors=(COOL,), **fields)


def test_short_lists_of_rules_are_filled_with_nothing():
    rules = F.make_rules(
        3, SIZES, processors=(COOL,), processor_params={"cool": 5}, bias_ids=[7], bias=1.5, is_on=0
    )
    assert rules.processors["cool"].tolist() == [5, 5, 5]
    assert rules.bias_ids[:, :2].tolist() == [[7, -1]] * 3
    assert rules.bias[:, :2].tolist() == [[1.5, 0.0]] * 3
    assert rules.bias_ids.shape == (3, SIZES.num_biases)
    assert not rules.is_on.any()


def test_a_state_without_room_for_rules_says_so():
    with pytest.raises(ValueError, match="make it with rule_sizes"):
        jax.eval_shape(lambda: generate(make_params(), make_state(), rules=F.make_rules(3, SIZES)))
