"""Beam windows against beam search one sequence at a time."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.core.beam import beam_window, blocks_wanted, spread
from jpaged.core.beam_rules import HF_FALSE, HF_NEVER, HF_TRUE, VLLM, Beams, init_beams
from jpaged.core.block_pool import num_free
from jpaged.core.step import STATUS_BAD_NUMBERS, STATUS_NO_BLOCKS, STATUS_OK
from tests.core.scripted import next_logits
from tests.core.small_core import (
    Request,
    blocks_of,
    check,
    fragile_forward,
    fragile_params,
    fresh,
    leave_free,
    let_go,
    run,
    seat,
    tokens_of,
)
from tests.oracles.beam_search import hf_beam_search, vllm_beam_search

EARLY_STOPPING = {HF_FALSE: False, HF_TRUE: True, HF_NEVER: "never"}
NUM_EOS, MAX_TOKENS = 2, 8
WIDTHS_AND_STEPS = [(1, 3), (3, 1), (3, 3), (4, 8)]  # each pair is a program of its own

_window = jax.jit(
    ft.partial(beam_window, forward=fragile_forward),
    static_argnames=("num_steps", "num_candidates"),
)
_wanted = jax.jit(blocks_wanted, static_argnames="num_steps")
_spread = jax.jit(spread)


def logprobs_after(tokens: list[int]) -> np.ndarray:
    logits = next_logits(tokens)
    return logits - np.log(np.sum(np.exp(logits)))


def make_beams(row_ids: list[list[int]], max_lens: list[int], *, eos_ids=(), **fields) -> Beams:
    prompt_lens = jnp.array(max_lens, jnp.int32) - MAX_TOKENS
    eos_ids = [*eos_ids, -1, -1][:NUM_EOS]
    return init_beams(
        jnp.array(row_ids, jnp.int32), prompt_lens, max_tokens=MAX_TOKENS, eos_ids=eos_ids, **fields
    )


def window(state, beams, num_steps, *, params=None):
    W = beams.row_ids.shape[1]
    num_candidates = (1 + NUM_EOS) * W
    state, beams, output = _window(
        params or fragile_params(),
        state,
        beams,
        num_steps=num_steps,
        num_candidates=num_candidates,
    )
    return check(state), beams, jax.device_get(output)


def start(state, prompts: list[list[int]], rows: list[list[int]]):
    """Seats prompts in the first rows of their groups, all but the last token read."""
    for prompt, (leader, *_) in zip(prompts, rows, strict=True):
        state, _ = seat(state, Request(leader, prompt))
        while len(prompt) - 1 > state.rows.context_len[leader]:
            left = len(prompt) - 1 - int(state.rows.context_len[leader])
            state, _ = run(state, [leader], limits=[left])
    return state


def results(beams: Beams, group: int) -> list[tuple[list[int], float, float]]:
    """Finished and, under vLLM's rule, live sequences, best first."""
    found = []
    for kind in (beams.finished, beams.live) if beams.rule[group] == VLLM else (beams.finished,):
        kind = jax.device_get(kind)
        for w in np.flatnonzero(kind.score[group] > -np.inf):
            tokens = kind.token_ids[group, w, : kind.lengths[group, w]].tolist()
            cum = float(kind.cum_logprob[group, w])
            assert cum == pytest.approx(kind.logprobs[group, w].sum(), abs=1e-5)
            found.append((tokens, cum, float(kind.score[group, w])))
    found.sort(key=lambda one: -one[2])
    return found[: beams.row_ids.shape[1]]


def oracle(prompt, width, max_tokens, *, rule, eos_ids, length_penalty, ignores_eos=False):
    options = {"eos_ids": eos_ids, "length_penalty": length_penalty}
    if rule == VLLM:
        options["ignore_eos"] = ignores_eos
        return vllm_beam_search(logprobs_after, prompt, width, max_tokens, **options)
    options["early_stopping"] = EARLY_STOPPING[rule]
    return hf_beam_search(logprobs_after, prompt, width, max_tokens, **options)


def assert_found(got, want) -> None:
    assert [tokens for tokens, *_ in got] == [tokens for tokens, *_ in want]
    np.testing.assert_allclose([one[1:] for one in got], [one[1:] for one in want], atol=1e-4)


def read_prompt(prompt: list[int], rows: list[int], **fields):
    """A group that has read its prompt, and its beams."""
    state = start(fresh(), [prompt], [rows])
    return state, make_beams([rows], [len(prompt) + MAX_TOKENS], **fields)


def test_a_group_that_does_not_fit_sits_out_and_goes_on_later():
    prompts, rows = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]], [[1, 2], [3, 4]]
    state = start(fresh(), prompts, rows)
    beams = make_beams(rows, [len(p) + MAX_TOKENS for p in prompts])
    wanted = _wanted(state.rows, beams, num_steps=8)
    short = leave_free(state, int(wanted.sum()) - 1)
    before = jax.device_get(short.rows)
    short, beams, output = window(short, beams, 8)
    assert output.status.tolist() == [STATUS_OK, STATUS_NO_BLOCKS]
    assert beams.is_done.tolist() == [True, False]
    for row in rows[1]:
        assert tokens_of(short, row) == before.token_ids[row, : before.num_tokens[row]].tolist()
    short = let_go(short, *rows[0])
    _, beams, output = window(short, beams, 8)
    assert output.status.tolist() == [STATUS_OK, STATUS_OK]
    for group, prompt in enumerate(prompts):
        want = vllm_beam_search(logprobs_after, prompt, 2, MAX_TOKENS)
        assert_found(results(beams, group), want)


def test_bad_numbers_end_their_group_alone():
    prompts, rows = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 9]], [[1, 2], [3, 4]]
    state = start(fresh(), prompts, rows)
    beams = make_beams(rows, [len(p) + MAX_TOKENS for p in prompts])
    _, beams, output = window(state, beams, 8, params=fragile_params(nan_logits=5))
    assert output.status.tolist()[0] == STATUS_BAD_NUMBERS
    assert beams.is_done.tolist() == [True, True]
    want = vllm_beam_search(logprobs_after, prompts[1], 2, MAX_TOKENS)
    if output.status[1] == STATUS_OK:
        assert_found(results(beams, 1), want)


@pytest.mark.parametrize("steps_before", [(1,), (3,), (3, 3)])
def test_a_search_interrupted_and_spread_again_finds_the_same(steps_before):
    prompt, rows = [3, 1, 4, 1, 5, 9, 2], [1, 2, 3]
    state, beams = read_prompt(prompt, rows)
    for num_steps in steps_before:
        state, beams, _ = window(state, beams, num_steps)
    sequences = [tokens_of(state, row) for row in rows]
    state = let_go(state, *rows)

    columns = enumerate(zip(*sequences, strict=True))
    common = next(i for i, column in columns if len(set(column)) > 1)
    state, _ = seat(state, Request(1, sequences[0][: common + 1]))
    while (left := common - int(state.rows.context_len[1])) > 0:
        state, _ = run(state, [1], limits=[left])
    token_ids = np.zeros((3, len(sequences[0])), np.int32)
    token_ids[:] = sequences
    ids = jnp.array(rows, jnp.int32)
    state = check(
        _spread(state, jnp.ones_like(ids), ids, token_ids, jnp.full_like(ids, len(sequences[0])))
    )
    assert len({tuple(blocks_of(state, row)) for row in rows}) == 1, "they share all blocks"

    while not beams.is_done.all():
        state, beams, output = window(state, beams, 3)
        assert output.status.tolist() == [STATUS_OK]
    want = vllm_beam_search(logprobs_after, prompt, 3, MAX_TOKENS)
    assert_found(results(beams, 0), want)


tokens = st.lists(st.integers(0, 49), min_size=1, max_size=11)


@settings(max_examples=40)
@given(
    prompts=st.lists(tokens, min_size=2, max_size=2),
    sizes=st.sampled_from(WIDTHS_AND_STEPS),
    max_tokens=st.integers(1, MAX_TOKENS),
    rule=st.sampled_from([VLLM, HF_FALSE, HF_TRUE, HF_NEVER]),
    eos_ids=st.lists(st.integers(0, 49), min_size=NUM_EOS, max_size=NUM_EOS, unique=True),
    length_penalty=st.sampled_from([0.0, 1.0, 2.0, -1.0]),
    ignores_eos=st.booleans(),
)
def test_windows_find_what_the_rules_say(
    prompts, sizes, max_tokens, rule, eos_ids, length_penalty, ignores_eos
):
    """Two groups at a time; no window takes more blocks than it announced, none copies more than
    it must, and every block is free in the end."""
    width, num_steps = sizes
    if rule != VLLM:
        ignores_eos = False
    rows = [list(range(1, 1 + width)), list(range(5, 5 + width))]
    state = start(fresh(), prompts, rows)
    options = {"rule": rule, "eos_ids": eos_ids, "length_penalty": length_penalty}
    beams = make_beams(
        rows, [len(p) + max_tokens for p in prompts], ignores_eos=ignores_eos, **options
    )
    num_windows = 0
    while not np.all(beams.is_done):
        wanted = int(
            np.sum(np.where(beams.is_done, 0, _wanted(state.rows, beams, num_steps=num_steps)))
        )
        before = int(num_free(state.pool))
        state, beams, output = window(state, beams, num_steps)
        assert (output.status == STATUS_OK).all()
        assert before - output.num_free_blocks <= wanted
        num_windows += 1
    assert num_windows <= -(-max_tokens // num_steps)
    for group, prompt in enumerate(prompts):
        want = oracle(prompt, width, max_tokens, ignores_eos=ignores_eos, **options)
        assert_found(results(beams, group), want)
    state = let_go(let_go(state, 1, 2, 3, 4), 5, 6, 7, 8)
    assert int(num_free(state.pool)) == fresh().pool.ref_count.size - 1
