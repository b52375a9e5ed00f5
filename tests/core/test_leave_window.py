"""Models whose layers all have a window: blocks behind it are let go, and nobody misses them.

Before every call each block that no row holds is filled with nonsense, the null block too. A row
that let go too early, or looks where it no longer holds anything, draws another token.
"""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.core.admissions import Sampling
from jpaged.core.beam import beam_window
from jpaged.core.beam_rules import VLLM
from jpaged.core.block_pool import num_free
from jpaged.core.functional import generate
from jpaged.core.rows import admit, fork, leave_window, match_admissions, release
from jpaged.core.state import EngineState, check_invariants
from jpaged.core.step import STATUS_NO_BLOCKS, STATUS_OK, StepInputs, decode_window, step
from tests.core.scripted import (
    counting_params,
    greedy_continuation,
    next_logits,
    windowed_forward,
)
from tests.core.small_core import (
    BLOCK_SIZE,
    BUDGET,
    MAX_LEN,
    WIDTH,
    Request,
    admissions,
    blocks_of,
    free_order,
    fresh,
    tokens_of,
)
from tests.core.test_beam import make_beams, results
from tests.oracles.beam_search import vllm_beam_search

WINDOW = 6
PROMPTS = {1: [(7 * j * j + 3) % 50 for j in range(17)], 2: [4, 9], 3: [11, 3, 5, 8, 13, 21, 34, 5]}

_admit = jax.jit(ft.partial(admit, window=WINDOW))
_match = jax.jit(ft.partial(match_admissions, window=WINDOW))
_step = jax.jit(
    ft.partial(step, forward=windowed_forward(WINDOW), num_tokens=BUDGET, num_decode_rows=0)
)
_window = jax.jit(
    ft.partial(decode_window, forward=windowed_forward(WINDOW)), static_argnames="num_steps"
)
_beams = jax.jit(
    ft.partial(beam_window, forward=windowed_forward(WINDOW)),
    static_argnames=("num_steps", "num_candidates"),
)
_fork, _release = jax.jit(fork), jax.jit(release)


def most_held(num_new: int) -> int:
    """Blocks that the window before a token and `num_new` tokens can lie in."""
    return -(-(WINDOW - 1 + num_new) // BLOCK_SIZE) + 1


def padded(values: list[int]) -> np.ndarray:
    return np.array([*values, *[0] * (WIDTH - len(values))], np.int32)


def poisoned(state: EngineState) -> EngineState:
    """The state with nonsense in all blocks that no row holds."""
    is_free = np.asarray(state.pool.ref_count) == 0
    is_free[0] = True
    pages = jnp.where(is_free[:, None, None, None], 777.0, state.kv[0].k)
    return state.replace(kv=(state.kv[0].replace(k=pages),))


def check(state: EngineState) -> EngineState:
    check_invariants(state, window=WINDOW)
    return state


def seat(state: EngineState, *requests: Request) -> tuple[EngineState, list[int]]:
    state, num_cached = _admit(state, admissions(list(requests), MAX_LEN))
    return check(state), num_cached.tolist()[: len(requests)]


def run(state: EngineState, row_ids: list[int], limit: int = BUDGET, parent=None):
    own = list(range(WIDTH))
    parent = np.array([*(parent or []), *own[len(parent or []) :]], np.int32)
    inputs = StepInputs(padded(row_ids), padded([limit] * WIDTH), parent, padded([]))
    state, output = _step(counting_params(), poisoned(state), inputs)
    assert int(output.num_free_blocks) == int(num_free(state.pool))
    return check(state), output


def run_window(state: EngineState, row_ids: list[int], num_steps: int):
    state, output = _window(
        counting_params(), poisoned(state), padded(row_ids), num_steps=num_steps
    )
    assert output.num_free_blocks.tolist() == [int(num_free(state.pool))] * num_steps
    return check(state), output


def held(state: EngineState, row_id: int) -> list[int]:
    return [block for block in blocks_of(state, row_id) if block]


def right_tokens(prompt: list[int], max_len: int = MAX_LEN) -> list[int]:
    return prompt + greedy_continuation(prompt, max_len - len(prompt), window=WINDOW)


@pytest.mark.parametrize("limit", [1, 5, BUDGET])
@pytest.mark.parametrize("num_steps", [None, 1, 5])
def test_every_token_is_right_and_blocks_behind_the_window_are_free(limit, num_steps):
    """Prompts in chunks of `limit`, then decoding in windows of `num_steps`, or by steps."""
    state, _ = seat(fresh(), *(Request(i, p) for i, p in PROMPTS.items()))
    while state.rows.active.any():
        is_reading = np.any(np.asarray(state.rows.num_tokens - state.rows.context_len)[1:4] > 1)
        if is_reading or num_steps is None:
            state, _ = run(state, list(PROMPTS), limit)
        else:
            state, output = run_window(state, list(PROMPTS), num_steps)
            assert (output.status == STATUS_OK).all()
        num_new = max(limit, num_steps or 1)
        assert max(len(held(state, i)) for i in PROMPTS) <= most_held(num_new)
    for row_id, prompt in PROMPTS.items():
        assert tokens_of(state, row_id) == right_tokens(prompt)
    state = check(_release(state, padded(list(PROMPTS))))
    assert int(num_free(state.pool)) == fresh().pool.ref_count.size - 1


@pytest.mark.parametrize("num_new", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_row_longer_than_the_pool_ends_in_the_most_blocks_it_can_hold(num_new):
    """And in one block fewer it would not."""
    for num_blocks, is_enough in ((most_held(num_new), True), (most_held(num_new) - 1, False)):
        state, _ = seat(fresh(num_blocks=1 + num_blocks), Request(1, PROMPTS[1]))
        statuses = set()
        for _ in range(2 * MAX_LEN):
            if state.rows.num_tokens[1] - state.rows.context_len[1] > 1:
                state, output = run(state, [1], num_new)
            else:
                state, output = run_window(state, [1], num_new)
            statuses |= set(np.asarray(output.status).reshape(-1).tolist())
        assert (tokens_of(state, 1) == right_tokens(PROMPTS[1])) == is_enough
        assert (STATUS_NO_BLOCKS not in statuses) == is_enough


def test_blocks_are_freed_tail_first_and_stay_cached():
    state, _ = seat(fresh(), Request(1, PROMPTS[1]))
    state, _ = run(state, [1], 7)
    first, _ = blocks_of(state, 1)  # 7 is next, and sees 2 to 7
    state, _ = run(state, [1], 9)  # 16 is next, and sees 11 to 16
    assert blocks_of(state, 1)[:2] == [0, 0]
    second_first = free_order(state)[-2:]
    assert second_first[1] == first
    # The prompt of 17 tokens is found whole; its first two blocks are not kept.
    again = admissions([Request(2, PROMPTS[1])], MAX_LEN)
    num_cached, num_revived = _match(state, again)
    assert (int(num_cached[0]), int(num_revived[0])) == (16, 0)
    after, cached = seat(state, Request(2, PROMPTS[1]))
    assert cached == [16]
    assert blocks_of(after, 2) == blocks_of(state, 1)
    assert free_order(after)[-2:] == second_first  # used again, tail first


def test_a_prompt_whose_blocks_are_all_free_takes_only_those_in_the_window():
    state, _ = seat(fresh(), Request(1, PROMPTS[1]))
    state, _ = run(state, [1])
    state, _ = run(state, [1])
    state = check(_release(state, padded([1])))
    num_cached, num_revived = _match(state, admissions([Request(2, PROMPTS[1])], MAX_LEN))
    before = int(num_free(state.pool))
    state, cached = seat(state, Request(2, PROMPTS[1]))
    assert cached == num_cached.tolist()[:1] == [16]
    assert before - int(num_free(state.pool)) == int(num_revived[0]) == 2
    poison_keeps = poisoned(state).kv[0].k[jnp.array(held(state, 2))]
    np.testing.assert_array_equal(poison_keeps, state.kv[0].k[jnp.array(held(state, 2))])
    while state.rows.active[2]:
        state, _ = run(state, [2])
    assert tokens_of(state, 2) == right_tokens(PROMPTS[1])


def test_forks_share_what_is_left_and_the_last_to_leave_frees_it():
    state, _ = seat(fresh(), Request(1, PROMPTS[1]))
    state, _ = run(state, [1], 9)
    state, _ = run(state, [1, 2, 3], 8, parent=[0, 0, 0])  # forked in the step that lets go
    assert blocks_of(state, 1) == blocks_of(state, 2) == blocks_of(state, 3)
    shared = held(state, 1)[0]
    state, _ = run_window(state, [1, 2], 5)
    assert shared not in held(state, 1) + held(state, 2)
    assert int(state.pool.ref_count[shared]) == 1
    state = check(_fork(state, padded([3]), padded([4]), padded([1])))
    state, _ = run_window(state, [3, 4], 5)
    assert int(state.pool.ref_count[shared]) == 0
    while state.rows.active.any():
        state, _ = run_window(state, [1, 2, 3, 4], 5)
    for row_id in (1, 2, 3, 4):
        assert tokens_of(state, row_id) == right_tokens(PROMPTS[1])


@pytest.mark.parametrize("num_steps", [1, 3])
def test_beams_do_not_miss_them(num_steps):
    rows, max_tokens = [[1, 2, 3]], 8
    state, _ = seat(fresh(), Request(1, PROMPTS[1]))
    state, _ = run(state, [1], 16)
    beams = make_beams(rows, [len(PROMPTS[1]) + max_tokens])
    while not np.all(beams.is_done):
        state, beams, output = _beams(
            counting_params(), poisoned(state), beams, num_steps=num_steps, num_candidates=9
        )
        check(state)
        assert int(output.num_free_blocks) == int(num_free(state.pool))
        assert all(len(held(state, i)) <= most_held(num_steps) for i in rows[0])

    def logprobs_after(tokens: list[int]) -> np.ndarray:
        logits = next_logits(tokens, window=WINDOW)
        return logits - np.log(np.sum(np.exp(logits)))

    want = vllm_beam_search(
        logprobs_after, PROMPTS[1], 3, max_tokens, eos_ids=(), length_penalty=1.0, ignore_eos=False
    )
    assert beams.rule.tolist() == [VLLM]
    assert [tokens for tokens, *_ in results(beams, 0)] == [tokens for tokens, *_ in want]


def test_a_whole_generation_as_one_function():
    prompts = np.zeros((2, 17), np.int32)
    for place, prompt in enumerate((PROMPTS[1], PROMPTS[3])):
        prompts[place, : len(prompt)] = prompt
    keys = jax.random.split(jax.random.key(0), 2)
    found = jax.jit(
        ft.partial(
            generate,
            forward=windowed_forward(WINDOW),
            max_new_tokens=12,
            sampling=Sampling(temperature=0.0),
            n=2,
            num_prefill_tokens=8,
            num_decode_steps=3,
        )
    )(counting_params(), fresh(), jnp.asarray(prompts), jnp.array([17, 8]), keys)
    for row, prompt in enumerate([PROMPTS[1]] * 2 + [PROMPTS[3]] * 2):
        want = greedy_continuation(prompt, 12, window=WINDOW)
        assert found.token_ids[row].tolist() == want
    assert int(num_free(check(found.state).pool)) == fresh().pool.ref_count.size - 1


def test_without_a_window_nothing_is_done():
    state, _ = seat(fresh(), Request(1, PROMPTS[1]))
    assert leave_window(state, jnp.array([1]), window=None) is state
