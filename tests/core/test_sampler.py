"""The jitted sampler against the plain one, row by row, and against itself in other batches."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.core import vocabulary
from jpaged.core.sampling import PLAIN, Sampled, Sampler
from tests.core.sampler_cases import cases
from tests.core.sampler_rows import SHIFT, Case, make_batch, random_bits, run, take
from tests.oracles import sampler as oracle

pytestmark = pytest.mark.optimized

NUM_ROWS = 8
SMALL, ODD, LARGE = 50, 130, 5000  # of the last, the likeliest tiles are but a part
FULL = {
    mode: Sampler(has_rules=True, num_top=5, logprobs_mode=mode, processors=(SHIFT,))
    for mode in ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
}


# --- comparing ---


def batches(vocab_size: int) -> st.SearchStrategy[list[Case]]:
    return st.lists(cases(vocab_size), min_size=NUM_ROWS, max_size=NUM_ROWS)


@jax.jit
def relative(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    return vocabulary.relative(logits, temperature)


def probabilities(rows: list[oracle.Row]) -> np.ndarray:
    """The oracle's relative probabilities, but with the rounding of XLA's `exp`."""
    logits = np.stack([oracle.processed(row) for row in rows])
    temperature = [1.0 if row.is_greedy else row.temperature for row in rows]
    probs = np.asarray(relative(jnp.asarray(logits), jnp.asarray(temperature, jnp.float32)))
    for i in range(len(rows)):
        want = oracle.relative(logits[i], temperature[i])
        np.testing.assert_allclose(probs[i], want, rtol=2e-5, atol=1e-30)
    return probs


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    """Infinities are equal, numbers to 1e-5."""
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def assert_told_right(got: Sampled, i: int, record: oracle.Record, case: Case) -> None:
    """What row i is told. Of equally likely ids any may stand, in any order, where the last of the
    likeliest ones are among them; no id stands twice."""
    token, told = int(got.tokens[i]), got.told
    assert_close(told.logprobs[i], record.numbers[token])
    assert told.ranks[i] == record.rank(token)
    ids = np.asarray(told.top_ids[i])
    assert len(set(ids.tolist())) == len(ids)
    best = record.top(len(ids))
    np.testing.assert_array_equal(record.logits[ids], record.logits[best])
    assert_close(told.top_logprobs[i], record.numbers[best])
    asked = list(case.asked)
    assert_close(told.asked_logprobs[i][: len(asked)], record.numbers[asked])


def check(drawn: list[Case], sampler: Sampler) -> None:
    """Every row of a batch is as the oracle has it."""
    batch = make_batch(drawn)
    got = jax.tree.map(np.asarray, run(batch, sampler=sampler))
    bits = np.asarray(random_bits(batch))
    probs = probabilities([case.row for case in drawn])
    for i, case in enumerate(drawn):
        row = case.row
        if not case.is_sampling:
            assert got.tokens[i] == 0
        else:
            assert got.tokens[i] == oracle.token(row, int(bits[i]), probs[i]), row
        assert got.has_choice[i] == (
            not case.has_rules or bool((oracle.processed(row) > -np.inf).any())
        )
        if case.is_sampling and case.want_logprobs:
            record = oracle.record(row, sampler.logprobs_mode, probs[i])
            assert_told_right(got, i, record, case)
        else:
            assert all(not leaf[i].any() for leaf in got.told)


def assert_same_bits(got: Sampled, want: Sampled) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    "mode",
    [mode if mode != "raw_logits" else pytest.param(mode, marks=pytest.mark.slow) for mode in FULL],
)
@given(drawn=batches(SMALL))
@settings(max_examples=60)
def test_rows_are_as_the_oracle_has_them(mode, drawn):
    check(drawn, FULL[mode])


@given(drawn=batches(ODD))
@settings(max_examples=60)
def test_rows_are_as_the_oracle_has_them_in_an_odd_vocabulary(drawn):
    check(drawn, FULL["processed_logprobs"])


@pytest.mark.slow
@given(drawn=batches(LARGE))
@settings(max_examples=15)
def test_rows_are_as_the_oracle_has_them_in_a_larger_vocabulary(drawn):
    check(drawn, FULL["processed_logprobs"])


@given(drawn=batches(ODD))
@settings(max_examples=15)
def test_whole_vocabularies_are_told_in_the_order_of_ids(drawn):
    sampler = Sampler(has_rules=True, num_top=ODD + 1, processors=(SHIFT,))
    told = run(make_batch(drawn), sampler=sampler).told
    for i, case in enumerate(drawn):
        if case.is_sampling and case.want_logprobs:
            np.testing.assert_array_equal(told.top_ids[i], np.arange(ODD))
            assert_close(told.top_logprobs[i], oracle.record(case.row, "raw_logprobs").numbers)


# --- a row alone and in other batches ---


@given(
    drawn=batches(SMALL), order=st.permutations(range(NUM_ROWS)), row=st.integers(0, NUM_ROWS - 1)
)
@settings(max_examples=40)
def test_bits_do_not_depend_on_order_and_neighbours(drawn, order, row):
    sampler = FULL["processed_logprobs"]
    batch = make_batch(drawn)
    got = run(batch, sampler=sampler)
    assert_same_bits(run(take(batch, order), sampler=sampler), take(got, order))
    copies = [row] * NUM_ROWS
    assert_same_bits(run(take(batch, copies), sampler=sampler), take(got, copies))
    plain = Case(row=oracle.Row(logits=np.zeros(SMALL, np.float32)), has_rules=False)
    alone = make_batch([case if i == row else plain for i, case in enumerate(drawn)])
    assert_same_bits(take(run(alone, sampler=sampler), [row]), take(got, [row]))


@pytest.mark.parametrize("vocab_size", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)])
@given(data=st.data())
@settings(max_examples=15)
def test_rows_without_rules_get_the_same_bits_from_the_plain_sampler(vocab_size, data):
    drawn = data.draw(batches(vocab_size))
    batch = make_batch(drawn)
    full = run(batch, sampler=FULL["raw_logprobs"])
    plain = run(batch, sampler=PLAIN)
    free = [i for i, case in enumerate(drawn) if not case.has_rules]
    hypothesis.assume(free)
    got, want = take(plain, free), take(full, free)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.told.logprobs, want.told.logprobs)
    np.testing.assert_array_equal(got.told.ranks, want.told.ranks)
