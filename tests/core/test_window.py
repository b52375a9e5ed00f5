"""Steps and windows: what a row draws depends on nothing but the row."""

import jax
import numpy as np
import pytest

from jpaged.core.block_pool import num_free, reset_hashes
from jpaged.core.sampling import RUNNING, STOP_EOS, STOP_LENGTH, STOP_TOKEN
from jpaged.core.step import STATUS_BAD_NUMBERS, STATUS_NO_BLOCKS, STATUS_OK, STOP_ERROR
from tests.core.scripted import greedy_continuation
from tests.core.small_core import (
    BUDGET,
    FILLERS,
    Request,
    assert_same_bits,
    blocks_of,
    contents,
    finish,
    fragile_params,
    fresh,
    hold,
    leave_free,
    let_go,
    run,
    run_window,
    seat,
    tokens_of,
)

PROMPTS = {
    1: [3, 1, 4, 1, 5],
    2: [2, 7, 1, 8, 2, 8, 1, 8],
    3: [1, 6, 1, 8, 0, 3, 3, 9, 8, 8, 7],
    4: [5, 7, 7],
}
WAYS = {
    "greedy": {},
    "temperature": {"temperature": 1.0, "seed": 2**40 + 3},
    "top_k": {"temperature": 1.5, "top_k": 5, "seed": 1},
    "top_p": {"temperature": 0.8, "top_p": 0.7, "seed": 0},
}
MIXED = dict(zip(PROMPTS, WAYS.values(), strict=True))  # each row samples in a way of its own


def read(state, *requests: Request):
    """Seats requests and reads their prompts one by one, so that each has one token drawn."""
    state, _ = seat(state, *requests)
    for request in requests:
        state, output = run(state, [request.row_id])
        assert output.is_sampled[0]
    return state


def crowd(**options):
    """Rows 1 to 4, each with its own way of sampling, prompts read."""
    requests = [Request(i, p, **{**MIXED[i], **options}) for i, p in PROMPTS.items()]
    return read(fresh(), *requests)


def views(state, row_ids=tuple(PROMPTS)) -> list[dict]:
    return [contents(state, i) for i in row_ids]


def stacked(outputs):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *outputs)


class TestWindowIsSteps:
    NAMES = ("token_ids", "logprobs", "is_sampled", "finish_reason", "granted", "status")

    def assert_equal(self, state, num_steps: int, row_ids=tuple(PROMPTS)):
        """The window's rows, pages, hashes and outputs are those of steps; returns the window's."""
        row_ids = list(row_ids)
        window, output = run_window(state, row_ids, num_steps)
        outputs = []
        for _ in range(num_steps):
            state, one = run(state, row_ids)
            outputs.append(one)
        assert views(window, row_ids) == views(state, row_ids)
        want = stacked(outputs)
        for name in self.NAMES:
            np.testing.assert_array_equal(getattr(output, name), getattr(want, name), err_msg=name)
        return window, output

    @pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
    def test_rows_that_go_on(self, num_steps):
        state, output = self.assert_equal(crowd(), num_steps)
        assert output.is_sampled.all()
        self.assert_equal(state, num_steps, row_ids=[3, 1])

    @pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
    def test_rows_that_stop_by_length_at_different_times(self, num_steps):
        requests = [
            Request(i, PROMPTS[i], max_len=len(PROMPTS[i]) + 1 + i, **MIXED[i]) for i in PROMPTS
        ]
        _, output = self.assert_equal(read(fresh(), *requests), num_steps)
        assert output.is_sampled.sum(axis=0).tolist() == [min(i, num_steps) for i in PROMPTS]
        for i in range(1, num_steps):
            assert output.finish_reason[:i, i - 1].tolist() == [RUNNING] * (i - 1) + [STOP_LENGTH]
            assert not output.granted[i:, i - 1].any()

    @pytest.mark.parametrize("num_steps", [2, 5])
    def test_rows_that_stop_by_tokens(self, num_steps):
        free = finish(crowd(), list(PROMPTS))
        drawn = {i: tokens_of(free, i)[len(p) :] for i, p in PROMPTS.items()}
        stops = {
            1: {"eos_id": drawn[1][2]},
            2: {"stop_ids": (49, drawn[2][1])},
            3: {"eos_id": drawn[3][1], "stop_ids": (drawn[3][1],)},
            4: {"stop_ids": (drawn[4][1],), "min_len": len(PROMPTS[4]) + 4},
        }
        requests = [Request(i, p, **MIXED[i], **stops[i]) for i, p in PROMPTS.items()]
        state = read(fresh(), *requests)
        assert state.rows.active[1:5].all(), "a row stopped with its first token"
        state, output = self.assert_equal(state, num_steps)
        reasons = output.finish_reason.max(axis=0).tolist()
        want = [STOP_EOS if num_steps > 2 else reasons[0], STOP_TOKEN, STOP_EOS, reasons[3]]
        assert reasons == want
        for i, p in PROMPTS.items():
            got = tokens_of(state, i)[len(p) :]
            assert got == drawn[i][: len(got)]
        assert len(tokens_of(state, 4)) >= min(len(PROMPTS[4]) + 4, len(PROMPTS[4]) + 1 + num_steps)

    def test_a_row_that_goes_wrong_inside(self):
        # The token that row 1 draws third turns to NaN when it is read.
        state = crowd()
        drawn = [tokens_of(finish(state, list(PROMPTS)), i) for i in PROMPTS]
        bad = drawn[0][len(PROMPTS[1]) + 2]
        params = fragile_params(nan_hidden=bad)
        state, output = run_window(state, list(PROMPTS), 5, params=params)
        assert output.finish_reason[:, 0].tolist() == [0, 0, STOP_ERROR, 0, 0]
        assert output.granted[:, 0].tolist() == [1, 1, 1, 0, 0]
        assert output.status[2, 0] == STATUS_BAD_NUMBERS

    @pytest.mark.parametrize("num_run", [1, 3, 5])
    def test_one_program_runs_windows_of_any_length(self, num_run):
        """State and outputs are those of a window so long, with zeros behind the outputs. A row
        stops inside, and one at the end."""
        lengths = {1: 2, 2: num_run, 3: 20, 4: 20}
        state = read(
            fresh(),
            *(
                Request(i, p, max_len=len(p) + 1 + lengths[i], **MIXED[i])
                for i, p in PROMPTS.items()
            ),
        )
        whole, want = run_window(state, list(PROMPTS), num_run)
        part, output = run_window(state, list(PROMPTS), 5, num_run=num_run)
        assert_same_bits(part, whole)
        for path, got in jax.tree.leaves_with_path(output):
            if path[0].name == "num_free_blocks":
                assert got.tolist() == [want.num_free_blocks[0]] * 5
            else:
                assert not got[num_run:].any(), path
        behind = jax.tree.map(lambda x: x[:num_run], output)
        jax.tree.map(np.testing.assert_array_equal, behind, want)

    def test_alone_the_bits_of_the_whole_state_are_those_of_steps(self):
        window = steps = read(fresh(), Request(2, PROMPTS[2], **WAYS["top_p"]))
        for num_steps in (1, 2, 3, 4, 5):
            window, _ = run_window(window, [2], num_steps)
            for _ in range(num_steps):
                steps, _ = run(steps, [2])
            assert_same_bits(window.replace(kv=()), steps.replace(kv=()))
            assert_same_bits(window.kv[0].k[1:], steps.kv[0].k[1:])

    def test_a_row_with_more_than_one_token_to_read_takes_no_part(self):
        state = crowd()
        state, _ = seat(let_go(state, 4), Request(4, PROMPTS[4]))
        after, output = run_window(state, [4, 1], 2)
        assert output.granted.tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]]
        assert contents(after, 4) == contents(state, 4)
        assert output.status[:, 0].tolist() == [STATUS_OK] * 2

    def test_no_more_blocks_are_taken_than_a_row_can_still_use(self):
        state = read(fresh(), Request(1, PROMPTS[2], max_len=len(PROMPTS[2]) + 3))
        before = int(num_free(state.pool))
        state, _ = run_window(state, [1], 5)
        assert before - int(num_free(state.pool)) == 1
        assert len(tokens_of(state, 1)) == len(PROMPTS[2]) + 3

    def test_min_len_beyond_max_len_does_not_carry_a_row_past_its_blocks(self):
        request = Request(1, PROMPTS[2], max_len=len(PROMPTS[2]) + 2, min_len=30)
        state, output = run_window(read(fresh(), request), [1], 5)
        assert output.finish_reason[:, 0].tolist() == [STOP_LENGTH, 0, 0, 0, 0]
        assert len(tokens_of(state, 1)) == request.max_len


class TestMixedStep:
    def test_decoding_rows_and_prompts_in_one_step_are_steps_of_their_own(self):
        new = [Request(i, PROMPTS[i], reads_cache=False, **MIXED[i]) for i in (3, 4)]
        state, _ = seat(let_go(crowd(), 3, 4), *new)
        mixed, output = run(state, [1, 2, 3, 4], num_decode_rows=2, num_tokens=BUDGET)
        apart, first = run(state, [1, 2])
        apart, second = run(apart, [3, 4])
        assert views(mixed) == views(apart)
        assert output.granted.tolist() == [1, 1, 11, 3]
        assert output.token_ids.tolist() == [*first.token_ids[:2], *second.token_ids[:2]]

    def test_a_decode_row_without_blocks_leaves_its_place_empty(self):
        state = read(fresh(), *(Request(i, PROMPTS[i]) for i in (1, 2)))  # row 2 ends a block
        state, _ = seat(state, Request(3, PROMPTS[3]))
        state, _ = hold(state, [3], [11])
        state = leave_free(state, 0)
        after, output = run(state, [2, 1, 3], num_decode_rows=2)
        assert output.granted[:3].tolist() == [0, 1, 11]
        assert output.status[:3].tolist() == [STATUS_NO_BLOCKS, STATUS_OK, STATUS_OK]
        assert contents(after, 2) == contents(state, 2)
        apart, _ = run(run(state, [1])[0], [3])
        assert views(after, [1, 3]) == views(apart, [1, 3])

    def test_prompts_are_clipped_in_row_order_to_what_the_budget_leaves(self):
        prompts = {5: PROMPTS[1] * 3, 6: PROMPTS[2] * 3, 7: PROMPTS[3] * 2}
        new = [Request(i, tokens, reads_cache=False) for i, tokens in prompts.items()]
        state, _ = seat(crowd(), *new)
        _, output = run(state, [1, 7, 5, 6], num_decode_rows=0, limits=[16, 4, 16, 16])
        assert output.granted.tolist() == [1, 4, 11, 0]
        assert output.is_sampled.tolist() == [True, False, False, False]
        assert output.status.tolist() == [STATUS_OK] * 4
        _, output = run(state, [1, 2, 7, 5], num_decode_rows=2)
        assert output.granted.tolist() == [1, 1, 14, 0]
        _, output = run(state, [6, 5, 7, 1], limits=[2, 0, 99, 1])
        assert output.granted.tolist() == [2, 0, 14, 0]

    def test_a_row_that_has_stopped_takes_no_part(self):
        state = read(fresh(), Request(1, PROMPTS[1], max_len=6), Request(2, PROMPTS[2]))
        assert state.rows.active[1:3].tolist() == [False, True]
        after, output = run(state, [1, 2])
        assert output.granted.tolist() == [0, 1, 0, 0]
        assert contents(after, 1) == contents(state, 1)


@pytest.fixture(scope="module")
def alone() -> dict[int, dict]:
    """What each row holds in the end if it runs alone."""

    def lonely(i: int):
        return finish(read(fresh(), Request(i, PROMPTS[i], max_len=24, **MIXED[i])), [i])

    return {i: contents(lonely(i), i) for i in PROMPTS}


class TestRowsDoNotFeelEachOther:
    """Twelve tokens or more of each row, in every way of sampling."""

    def requests(self, row_ids=tuple(PROMPTS)):
        return [Request(i, PROMPTS[i], max_len=24, **MIXED[i]) for i in row_ids]

    def test_greedy_is_what_plain_python_says(self, alone):
        tokens = alone[1]["tokens"]
        assert tokens == PROMPTS[1] + greedy_continuation(PROMPTS[1], len(tokens) - len(PROMPTS[1]))

    @pytest.mark.parametrize("order", [[1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1, 3]])
    @pytest.mark.parametrize("limit", [1, 3, 16])
    def test_in_a_crowd_in_any_order_and_chunk(self, alone, order, limit):
        state, _ = seat(fresh(), *self.requests())
        state = finish(state, order, limits=[limit] * 4)
        assert views(state) == list(alone.values())

    def test_in_other_rows_of_the_state(self, alone):
        requests = self.requests()
        for request in requests:
            request.row_id = 9 - request.row_id
        state, _ = seat(fresh(), *requests[::-1])
        state = finish(state, [8, 6, 5, 7])
        assert views(state, [8, 7, 6, 5]) == list(alone.values())

    @pytest.mark.parametrize("num_steps", [2, 5])
    def test_in_windows(self, alone, num_steps):
        state = read(fresh(), *self.requests())
        while state.rows.active.any():
            state, _ = run_window(state, [3, 1, 4, 2], num_steps)
        assert views(state) == list(alone.values())

    @pytest.mark.parametrize("keeps_cache", [True, False])
    def test_preempted_and_resumed(self, alone, keeps_cache):
        state = read(fresh(), *self.requests())
        for victim in (2, 4, 1, 3, 2):
            state, _ = run(state, [1, 2, 3, 4])
            tokens = tokens_of(state, victim)
            state = let_go(state, victim)
            if not keeps_cache:
                state = state.replace(pool=reset_hashes(state.pool))
            state, _ = run(state, [i for i in PROMPTS if i != victim])
            again = Request(victim, tokens, 24, len(PROMPTS[victim]), **MIXED[victim])
            state, cached = seat(state, again)
            # All its full blocks, or none.
            assert cached == [(len(tokens) - 1) // 4 * 4 if keeps_cache else 0]
        state = finish(state, list(PROMPTS), limits=[5] * 4)
        got = views(state)
        if not keeps_cache:  # blocks read before the reset have lost their hashes
            for row, want in zip(got, alone.values(), strict=True):
                row["hashes"] = want["hashes"]
        assert got == list(alone.values())

    def test_a_neighbour_with_nan_changes_no_token(self, alone):
        bad = Request(5, [49, 3, 1], temperature=1.0)
        state, _ = seat(fresh(), *self.requests([1, 2, 3]), bad)
        params = fragile_params(nan_hidden=49)
        state = finish(state, [1, 5, 2, 3], params=params)
        # No row draws the token that is bad for all, or the comparison would mean nothing.
        assert not any(49 in alone[i]["tokens"] for i in (1, 2, 3))
        assert views(state, [1, 2, 3]) == [alone[i] for i in (1, 2, 3)]


SAMPLED = {"temperature": 1.0, "seed": 7, "max_len": 20}


class TestForksInAStep:
    PROMPT = PROMPTS[3]

    def alone(self, sample_index: int) -> list[int]:
        request = Request(1, self.PROMPT, sample_index=sample_index, **SAMPLED)
        return tokens_of(finish(seat(fresh(), request)[0], [1]), 1)

    def test_each_sample_is_what_the_request_alone_draws_with_its_index(self):
        state, _ = seat(fresh(), Request(1, self.PROMPT, **SAMPLED))
        fork = {"parent": [0, 0, 0, 0], "sample_index": [0, 1, 2, 3]}
        state, output = run(state, [1, 2, 3, 4], **fork)
        assert output.is_sampled.all()
        assert output.granted.tolist() == [11, 0, 0, 0]
        assert state.rows.sample_index[1:5].tolist() == [0, 1, 2, 3]
        assert state.rows.active[1:5].all()
        assert len({tuple(blocks_of(state, i)) for i in (1, 2, 3, 4)}) == 1
        state = finish(state, [1, 2, 3, 4])
        samples = [tokens_of(state, i) for i in (1, 2, 3, 4)]
        assert samples == [self.alone(index) for index in range(4)]
        assert len({tuple(tokens) for tokens in samples}) == 4

    def test_children_may_stand_before_their_parent_and_two_families_in_one_step(self):
        state, _ = seat(
            fresh(),
            Request(3, self.PROMPT, **SAMPLED),
            Request(4, PROMPTS[4], **SAMPLED),
        )
        fork = {"parent": [1, 1, 3, 3], "sample_index": [2, 0, 1, 0]}
        state, output = run(state, [1, 3, 2, 4], **fork)
        assert output.is_sampled.all()
        state = finish(state, [1, 3, 2, 4])
        assert tokens_of(state, 1) == self.alone(2)
        assert tokens_of(state, 3) == self.alone(0)
        other = Request(1, PROMPTS[4], sample_index=1, **SAMPLED)
        assert tokens_of(state, 2) == tokens_of(finish(seat(fresh(), other)[0], [1]), 1)

    def test_a_fork_after_the_prompt_was_read_in_chunks(self):
        state, _ = seat(fresh(), Request(1, self.PROMPT, **SAMPLED))
        fork = {"parent": [0, 0], "sample_index": [0, 1]}
        for is_last in (False, False, True):
            before = state
            state, output = run(state, [1, 2], limits=[4, 4], **fork)
            assert output.is_sampled[:2].tolist() == [is_last] * 2
            if not is_last:  # a child waits, untouched, until its parent is there
                assert contents(state, 2) == contents(before, 2)
                assert output.finish_reason[:2].tolist() == [RUNNING] * 2
        state = finish(state, [1, 2])
        assert [tokens_of(state, i) for i in (1, 2)] == [self.alone(0), self.alone(1)]

    def test_a_child_of_a_parent_that_the_budget_clipped_waits(self):
        state, _ = seat(fresh(), Request(1, PROMPTS[2]), Request(2, self.PROMPT, **SAMPLED))
        fork = {"parent": [0, 1, 1], "sample_index": [0, 0, 1]}
        after, output = run(state, [1, 2, 3], **fork)
        assert output.granted.tolist() == [8, 8, 0, 0]
        assert output.is_sampled.tolist() == [True, False, False, False]
        assert contents(after, 3) == contents(state, 3)
        after, output = run(after, [1, 2, 3], **fork)
        assert output.is_sampled[:3].all()
        after = finish(after, [1, 2, 3])
        assert [tokens_of(after, i) for i in (2, 3)] == [self.alone(0), self.alone(1)]

    def test_a_child_that_stops_with_its_first_token_stops_alone(self):
        first = [self.alone(index)[len(self.PROMPT)] for index in range(2)]
        assert first[0] != first[1]
        request = Request(1, self.PROMPT, eos_id=first[1], **SAMPLED)
        state, _ = seat(fresh(), request)
        state, output = run(state, [1, 2], parent=[0, 0], sample_index=[0, 1])
        assert output.finish_reason[:2].tolist() == [RUNNING, STOP_EOS]
        assert state.rows.active[1:3].tolist() == [True, False]

    @pytest.mark.parametrize("kind", ["nan_hidden", "nan_logits"])
    def test_children_of_a_parent_that_went_wrong_stop_with_it(self, kind):
        state, _ = seat(fresh(), Request(1, [3, 5, 49]), Request(4, PROMPTS[4]))
        fork = {"parent": [0, 0, 2], "sample_index": [0, 1, 0]}
        state, output = run(state, [1, 2, 4], params=fragile_params(**{kind: 49}), **fork)
        assert output.status.tolist() == [STATUS_BAD_NUMBERS] * 2 + [STATUS_OK] * 2
        assert output.finish_reason.tolist() == [STOP_ERROR, STOP_ERROR, RUNNING, RUNNING]
        assert state.rows.active[1:5].tolist() == [False, False, False, True]


class TestErrorsAreData:
    @pytest.mark.parametrize("kind", ["nan_hidden", "nan_logits"])
    @pytest.mark.parametrize("order", [[1, 2, 3], [3, 2, 1]])
    def test_nan_marks_its_row_and_no_other(self, kind, order):
        prompts = {1: [1, 2, 3], 2: [4, 5, 49], 3: [6, 7]}
        state, _ = seat(fresh(), *(Request(i, p) for i, p in prompts.items()))
        after, output = run(state, order, params=fragile_params(**{kind: 49}))
        clean, _ = run(state, order)
        bad = order.index(2)
        for place in range(3):
            is_bad = place == bad
            assert output.status[place] == (STATUS_BAD_NUMBERS if is_bad else STATUS_OK)
            assert output.finish_reason[place] == (STOP_ERROR if is_bad else RUNNING)
            assert output.is_sampled[place] == (not is_bad)
        assert after.rows.active[1:4].tolist() == [True, False, True]
        assert tokens_of(after, 2) == prompts[2]
        assert views(after, [1, 3]) == views(clean, [1, 3])

    def test_nan_in_a_chunk_stops_the_row_before_its_prompt_is_read(self):
        state, _ = seat(fresh(), Request(1, [1, 49, 3, 4, 5, 6]))
        state, output = run(state, [1], limits=[3], params=fragile_params(nan_hidden=49))
        assert (output.finish_reason[0], output.status[0]) == (STOP_ERROR, STATUS_BAD_NUMBERS)
        assert not state.rows.active[1]

    def test_nan_left_in_padding_or_in_old_blocks_marks_nobody(self):
        params = fragile_params(nan_hidden=0)  # what padding tokens hold
        state, _ = seat(fresh(), Request(1, [1, 2, 3]))
        state, output = run(state, [1], params=params)
        assert output.status.tolist() == [STATUS_OK] * 4
        assert output.is_sampled[0]

    def exhausted(self):
        """Rows 1 and 2 at the end of their blocks, row 3 with room, no block free."""
        prompts = {1: PROMPTS[2], 2: [9, *PROMPTS[2][1:]], 3: PROMPTS[3]}
        state = read(fresh(), *(Request(i, p) for i, p in prompts.items()))
        return leave_free(state, 0)

    def test_rows_without_blocks_say_so_and_are_left_as_they_were(self):
        state = self.exhausted()
        after, output = run(state, [1, 3, 2])
        assert output.status.tolist() == [STATUS_NO_BLOCKS, STATUS_OK, STATUS_NO_BLOCKS, STATUS_OK]
        assert output.granted.tolist() == [0, 1, 0, 0]
        assert output.is_sampled.tolist() == [False, True, False, False]
        assert output.finish_reason.tolist() == [RUNNING] * 4
        assert int(output.num_free_blocks) == 0
        assert views(after, [1, 2]) == views(state, [1, 2])
        assert blocks_of(after, 1) == blocks_of(state, 1)

    def test_in_a_window_as_well(self):
        state = self.exhausted()
        after, output = run_window(state, [1, 3, 2], 2)
        assert output.status[:, :3].tolist() == [[STATUS_NO_BLOCKS] * 3] * 2
        assert_same_bits(after.rows, state.rows)
        assert_same_bits(after.pool, state.pool)
        after, output = run_window(state, [1, 3, 2], 1)  # row 3 has room for one
        assert output.status[0, :3].tolist() == [STATUS_NO_BLOCKS, STATUS_OK, STATUS_NO_BLOCKS]
        assert contents(after, 3) == contents(run(state, [3])[0], 3)

    def test_rows_go_on_when_blocks_come_back(self):
        state = let_go(self.exhausted(), *FILLERS)
        state = finish(state, [1])
        assert tokens_of(state, 1) == PROMPTS[2] + greedy_continuation(PROMPTS[2], 24)
