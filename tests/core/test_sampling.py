"""Sampling against sorts, against its own distribution, and against itself in other batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from jpaged.core import truncation, vocabulary
from jpaged.core.logits_rules import History
from jpaged.core.sampling import (
    RUNNING,
    STOP_EOS,
    STOP_LENGTH,
    STOP_TOKEN,
    SamplingState,
    finish_reasons,
    init_sampling_state,
    sample,
    seed_key,
)
from tests.oracles import sampling as oracle

pytestmark = pytest.mark.optimized


def make_rows(params: list[dict], *, seeds: list[int] | None = None) -> SamplingState:
    """One row per dict; what a dict leaves out is off."""
    rows = init_sampling_state(len(params), 4)
    seeds = list(range(len(params))) if seeds is None else seeds
    fields = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "want_logprobs": True}
    arrays = {
        name: jnp.asarray([p.get(name, off) for p in params], getattr(rows, name).dtype)
        for name, off in fields.items()
    }
    return rows.replace(key=jnp.asarray(np.stack([seed_key(s) for s in seeds])), **arrays)


_sample = jax.jit(sample)


@jax.jit
def draw(rows, positions, logits):
    B = positions.shape[0]
    on = jnp.ones(B, jnp.bool_)
    return sample(rows, jnp.zeros(B, jnp.int32), history_at(positions), logits, is_sampling=on)


def history_at(positions: jax.Array) -> History:
    """Rows of so many tokens, whichever they are."""
    nothing = jnp.zeros((positions.shape[0], 1), jnp.int32)
    return History(nothing, positions, jnp.zeros_like(positions))


def positions_of(num_rows: int, first: int = 0) -> jax.Array:
    return jnp.arange(first, first + num_rows, dtype=jnp.int32)


VOCAB = 50
LOGIT = st.one_of(
    st.integers(-6, 6).map(float),  # ties
    st.floats(-30, 30, width=32),
    st.sampled_from([-np.inf, -1e30, 1e30, 1e-30, 0.0]),
)
LOGITS = st.one_of(
    st.lists(LOGIT, min_size=VOCAB, max_size=VOCAB),
    st.integers(0, 2**32 - 1).map(lambda s: np.random.default_rng(s).normal(size=VOCAB) * 2),
)
PARAMS = st.fixed_dictionaries(
    {"temperature": st.floats(0.01, 2)},
    optional={
        "top_k": st.integers(2, VOCAB + 5),
        "top_p": st.floats(1e-6, 1),
        "min_p": st.floats(0, 1),
    },
)


@jax.jit
def kept_shares(rows, logits):
    on = jnp.ones(logits.shape[0], jnp.bool_)
    limits = truncation.Truncation(rows.temperature, rows.min_p, rows.top_k, rows.top_p, on)
    return truncation.kept_shares(limits, logits)


@jax.jit
def relative(logits, temperature):
    return vocabulary.relative(logits, temperature)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that the likeliest ones are a small part of a small vocabulary."""
    monkeypatch.setattr(truncation, "TILE", 4)
    monkeypatch.setattr(truncation, "FOLD", 2)
    monkeypatch.setattr(truncation, "NUM_NEAR", 4)
    for compiled in (draw, kept_shares):
        compiled.clear_cache()
    yield
    for compiled in (draw, kept_shares):
        compiled.clear_cache()


@pytest.mark.usefixtures("small_tiles")
class TestAgainstSorting:
    @given(
        rows=st.lists(st.tuples(LOGITS, PARAMS), min_size=4, max_size=4), seed=st.integers(0, 99)
    )
    @settings(max_examples=300, suppress_health_check=["function_scoped_fixture"])
    def test_the_same_ids_stay_and_the_same_id_is_drawn(self, rows, seed):
        logits = jnp.asarray(np.stack([row for row, _ in rows]), jnp.float32)
        state = make_rows([params for _, params in rows], seeds=[seed] * 4)
        probs = np.asarray(relative(logits, state.temperature))
        got = np.asarray(kept_shares(state, logits)).reshape(4, -1)
        tokens = np.asarray(draw(state, positions_of(4), logits).tokens)
        for i in range(4):
            options = {
                name: np.asarray(getattr(state, name))[i] for name in ("top_k", "top_p", "min_p")
            }
            kept = oracle.kept_ids(probs[i], **options)
            assert set(np.flatnonzero(got[i]).tolist()) == kept
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), i)
            bits = int(jax.random.bits(key, (), jnp.uint32))
            assert tokens[i] == oracle.draw(probs[i], kept, bits)


def test_relative_probabilities_are_those_of_float64():
    logits = np.random.default_rng(0).normal(size=(3, 700)).astype(np.float32) * 5
    temperature = np.array([0.3, 1.0, 1.7], np.float32)
    scaled = logits.astype(np.float64) / temperature[:, None]
    want = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    got = relative(jnp.asarray(logits), jnp.asarray(temperature))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 2.0},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params):
    num_draws, logits = 20_000, np.random.default_rng(5).normal(size=12).astype(np.float32) * 1.5
    rows = make_rows([params])
    many = jax.tree.map(lambda x: jnp.repeat(x, num_draws // 4, axis=0), rows)
    tiled = jnp.tile(jnp.asarray(logits), (num_draws // 4, 1))
    counts = sum(
        np.bincount(draw(many, positions_of(num_draws // 4, first), tiled).tokens, minlength=12)
        for first in range(0, num_draws, num_draws // 4)
    )
    want = oracle.probabilities(logits, **{"temperature": 1.0, **params}) * num_draws
    assert counts[want == 0].sum() == 0
    assert chisquare(counts[want > 0], want[want > 0]).pvalue > 1e-3


def test_greedy_takes_the_lowest_of_equal_ids_and_top_k_1_does_too():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(3, 300)), jnp.float32)
    logits = logits.at[:, jnp.array([250, 70, 130])].set(9.0)
    tokens = draw(
        make_rows([{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}]), positions_of(3), logits
    ).tokens
    assert tokens[:2].tolist() == [70, 70]
    assert int(tokens[2]) in {70, 130, 250}


def test_masked_ids_are_never_drawn_unless_all_are_masked():
    logits = np.full((64, 200), -np.inf, np.float32)
    logits[:32, [3, 199]] = 0.0
    tokens = np.asarray(draw(make_rows([{}] * 64), positions_of(64), jnp.asarray(logits)).tokens)
    assert set(tokens[:32].tolist()) == {3, 199}
    assert len(set(tokens[32:].tolist())) > 10
    assert tokens.max() < 200


def test_an_infinite_logit_wins():
    logits = jnp.zeros((2, 9)).at[:, 4].set(jnp.inf)
    drawn = draw(make_rows([{}, {"temperature": 0.0}]), positions_of(2), logits)
    assert drawn.tokens.tolist() == [4, 4]
    assert drawn.told.logprobs.tolist() == [0.0, 0.0]


def test_nan_logits_give_some_id_of_the_vocabulary():
    logits = jnp.full((2, 9), jnp.nan)
    tokens = draw(make_rows([{}, {"top_k": 3, "top_p": 0.5}]), positions_of(2), logits).tokens
    assert all(0 <= token < 9 for token in tokens.tolist())


def test_logprobs_are_those_of_the_raw_logits_and_only_where_wanted():
    logits = np.random.default_rng(3).normal(size=(4, 1000)).astype(np.float32) * 4
    rows = make_rows([{"temperature": 0.0}, {"temperature": 0.4, "top_k": 3}, {"top_p": 0.5}, {}])
    rows = rows.replace(want_logprobs=jnp.array([True, True, True, False]))
    drawn = draw(rows, positions_of(4), jnp.asarray(logits))
    wide = logits.astype(np.float64)
    want = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    got = np.asarray(drawn.told.logprobs)
    np.testing.assert_allclose(got[:3], want[np.arange(3), drawn.tokens[:3]], rtol=1e-5, atol=1e-6)
    assert got[3] == 0.0


def test_rows_that_do_not_sample_report_nothing():
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(3, 40)), jnp.float32)
    on = jnp.array([False, True, False])
    at = jnp.zeros(3, jnp.int32), history_at(positions_of(3))
    drawn = _sample(make_rows([{}] * 3), *at, logits, is_sampling=on)
    alone = draw(make_rows([{}], seeds=[1]), positions_of(1, 1), logits[1:2])
    assert drawn.tokens.tolist() == [0, int(alone.tokens[0]), 0]
    assert drawn.told.logprobs[jnp.array([0, 2])].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("seed", "key"),
    [
        (0, [0, 0]),
        (7, [0, 7]),
        (2**40, [256, 0]),
        (-2, [2**32 - 1, 2**32 - 2]),
        (2**64 - 2, [2**32 - 1, 2**32 - 2]),
        (2**64 + 7, [0, 7]),
    ],
)
def test_seeds_count_modulo_two_to_the_64(seed, key):
    assert seed_key(seed).tolist() == key


def test_seed_index_and_position_each_change_the_draw():
    logits = jnp.zeros((1, 5000))
    on = jnp.ones(1, jnp.bool_)

    def token(seed: int, index: int, position: int) -> int:
        at = jnp.array([index], jnp.int32), history_at(jnp.array([position], jnp.int32))
        rows = make_rows([{}], seeds=[seed])
        return int(_sample(rows, *at, logits, is_sampling=on).tokens[0])

    places = [(0, 0, 5), (2**40, 0, 5), (-5, 0, 5), (0, 1, 5), (0, 0, 6)]
    assert len({token(*place) for place in places}) == len(places)
    assert [token(*place) for place in places] == [token(*place) for place in places]


MIX = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.03, "temperature": 1.4},
    {"top_k": 20, "top_p": 0.6, "temperature": 0.9},
    {"top_p": 0.99, "temperature": 2.0},  # so wide that the likeliest tiles do not hold it
]


@functools.cache
def crowd(vocab: int) -> tuple[SamplingState, np.ndarray, np.ndarray, np.ndarray]:
    rows = make_rows([MIX[i % len(MIX)] for i in range(64)])
    rng = np.random.default_rng(vocab)
    spread = np.where(np.arange(64) % 5 == 0, 0.5, 3.0)[:, None]
    logits = jnp.asarray(rng.normal(size=(64, vocab)) * spread, jnp.float32)
    drawn = draw(rows, positions_of(64), logits)
    return jax.tree.map(np.asarray, (rows, logits, drawn.tokens, drawn.told.logprobs))


@pytest.mark.parametrize("vocab", [1009, 8192])
@pytest.mark.parametrize(
    "size", [1, 2, 3, 7, 16, 33, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 64))]
)
def test_a_row_draws_the_same_in_a_batch_of_any_size(size, vocab):
    rows, logits, tokens, logprobs = crowd(vocab)
    order = np.random.default_rng(size).permutation(64)
    for start in range(0, 64 - size + 1, max(size, 8)):
        ids = order[start : start + size]
        some = jax.tree.map(lambda x, ids=ids: jnp.asarray(x[ids]), rows)
        drawn = draw(some, jnp.asarray(ids, jnp.int32), jnp.asarray(logits[ids]))
        np.testing.assert_array_equal(drawn.tokens, tokens[ids])
        np.testing.assert_array_equal(drawn.told.logprobs, logprobs[ids])


def test_wide_and_narrow_rows_keep_what_sorting_keeps_in_a_real_vocabulary():
    rows, logits, _, _ = crowd(8192)
    logits = jnp.asarray(logits[:14])
    some = jax.tree.map(lambda x: jnp.asarray(x[:14]), rows)
    some = some.replace(temperature=jnp.maximum(some.temperature, 0.1))
    probs = np.asarray(relative(logits, some.temperature))
    got = np.asarray(kept_shares(some, logits)).reshape(14, -1)
    for i in range(14):
        options = {name: np.asarray(getattr(some, name))[i] for name in ("top_k", "top_p", "min_p")}
        assert set(np.flatnonzero(got[i]).tolist()) == oracle.kept_ids(probs[i], **options)


EOS, STOP, OTHER = 2, 7, 5


@pytest.mark.parametrize(
    ("token", "num_tokens", "min_len", "eos_id", "reason"),
    [
        (OTHER, 9, 0, EOS, RUNNING),
        (OTHER, 10, 0, EOS, STOP_LENGTH),
        (EOS, 5, 0, EOS, STOP_EOS),
        (EOS, 5, 0, -1, RUNNING),  # end of sequence ignored
        (EOS, 10, 0, EOS, STOP_EOS),  # before length
        (STOP, 5, 0, EOS, STOP_TOKEN),
        (STOP, 10, 0, EOS, STOP_TOKEN),  # before length
        (STOP, 5, 0, STOP, STOP_EOS),  # both: end of sequence comes first
        (EOS, 5, 6, EOS, RUNNING),  # too short to stop
        (STOP, 5, 6, EOS, RUNNING),
        (EOS, 6, 6, EOS, STOP_EOS),
        (EOS, 10, 12, EOS, STOP_LENGTH),  # too short to stop, but there is no room for more
    ],
)
def test_why_a_row_stops(token, num_tokens, min_len, eos_id, reason):
    rows = init_sampling_state(1, 3).replace(
        eos_id=jnp.array([eos_id], jnp.int32),
        stop_ids=jnp.array([[4, STOP, -1]], jnp.int32),
        min_len=jnp.array([min_len], jnp.int32),
        max_len=jnp.array([10], jnp.int32),
    )
    at = jnp.array([token], jnp.int32), jnp.array([num_tokens], jnp.int32)
    assert finish_reasons(rows, *at).tolist() == [reason]
