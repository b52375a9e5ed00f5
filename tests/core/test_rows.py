"""Rows: reserving blocks, copying shared ones before a write, forking, seating, letting go."""

import functools as ft
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.core.block_pool import num_free
from jpaged.core.rows import admit, match_admissions, release_all
from tests.core.small_core import (
    BLOCK_SIZE,
    FILLERS,
    MAX_LEN,
    Request,
    admissions,
    assert_same_bits,
    blocks_of,
    check,
    contents,
    finish,
    free_order,
    fresh,
    hold,
    leave_free,
    let_go,
    reseat,
    run,
    run_window,
    seat,
    split,
    tokens_of,
)

PROMPT = [(5 * i + i * i) % 48 for i in range(24)]


@ft.cache
def three_rows(num_free_blocks: int):
    """Rows 1, 2, 3, each with 10 tokens read into 3 blocks."""
    state, _ = seat(fresh(), *(Request(i, [(t + i) % 48 for t in PROMPT[:10]]) for i in (1, 2, 3)))
    for i in (1, 2, 3):
        state, _ = run(state, [i])
    return leave_free(state, num_free_blocks)


@ft.cache
def sharers(num_free_blocks: int, length: int = 10, **sampling):
    """Rows 1 to 4 share the blocks of one prompt, the last of them partly filled."""
    state, _ = seat(fresh(), Request(1, PROMPT[:length], **sampling))
    state, _ = run(state, [1])
    return leave_free(split(state, 1, 2, 3, 4), num_free_blocks)


class TestReserve:
    def test_rows_are_served_in_order_whole_or_not_at_all(self):
        before = three_rows(3)
        order = free_order(before)
        state, granted = hold(before, [2, 1, 3], [6, 10, 3])  # 1 block, 2, and one too many
        assert granted == [6, 10, 0]
        assert blocks_of(state, 2) == blocks_of(before, 2) + order[:1]
        assert blocks_of(state, 1) == blocks_of(before, 1) + order[1:]
        assert blocks_of(state, 3) == blocks_of(before, 3)

    @pytest.mark.parametrize(
        ("num_new", "granted"),
        [
            ([10, 6, 0], [0, 0, 0]),  # a row that fits does not pass one that failed
            ([10, 2, 6], [0, 2, 0]),  # but a row that needs no block goes on
            ([10, 10, 10], [0, 0, 0]),
            ([2, 2, 1], [2, 2, 1]),
            ([0, 0, 0], [0, 0, 0]),
        ],
    )
    def test_a_reservation_that_takes_no_block_changes_nothing(self, num_new, granted):
        before = three_rows(1)
        state, got = hold(before, [1, 2, 3], num_new)
        assert got == granted
        assert_same_bits(state, before)

    def test_blocks_already_held_are_not_asked_for_again(self):
        state, _ = hold(three_rows(2), [1], [10])
        assert int(num_free(state.pool)) == 0
        again, granted = hold(state, [1, 2], [10, 3])
        assert granted == [10, 0]
        assert_same_bits(again, state)

    def test_the_last_position_of_a_row_can_be_reserved(self):
        state, granted = hold(three_rows(5), [1], [MAX_LEN - 10])
        assert granted == [MAX_LEN - 10]
        assert len(blocks_of(state, 1)) == MAX_LEN // BLOCK_SIZE


class TestCopyOnWrite:
    @pytest.mark.parametrize("order", [[1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1, 3]])
    def test_of_n_sharers_all_but_the_last_copy(self, order):
        before = sharers(3)
        tail = blocks_of(before, 1)[2]
        free = free_order(before)
        state, granted = hold(before, order, [1] * 4)
        assert granted == [1] * 4
        assert [blocks_of(state, i)[2] for i in order] == [*free, tail]
        assert state.pool.ref_count[jnp.array(blocks_of(state, 1))].tolist() == [4, 4, 1]
        for i in order:
            assert blocks_of(state, i)[:2] == blocks_of(before, i)[:2]
            assert contents(state, i) == contents(before, i)

    @pytest.mark.parametrize("writers", [[2], [1], [3, 1], [4, 2, 3]])
    def test_where_a_holder_stays_away_all_who_write_copy(self, writers):
        before = sharers(3)
        tail = blocks_of(before, 1)[2]
        state, granted = hold(before, writers, [1] * len(writers))
        assert granted == [1] * len(writers)
        assert all(blocks_of(state, i)[2] != tail for i in writers)
        assert int(state.pool.ref_count[tail]) == 4 - len(writers)

    def test_a_holder_in_the_call_that_writes_nothing_counts_as_away(self):
        before = sharers(3)
        tail = blocks_of(before, 1)[2]
        state, _ = hold(before, [1, 2, 3, 4], [1, 0, 1, 1])
        assert [i for i in (1, 2, 3, 4) if blocks_of(state, i)[2] == tail] == [2]

    def test_the_only_holder_left_writes_in_place(self):
        before = let_go(sharers(0), 1, 2, 4)
        state, granted = hold(before, [3], [1])
        assert granted == [1]
        assert_same_bits(state, before)

    def test_full_blocks_are_not_copied(self):
        state, granted = hold(sharers(4, length=8), [1, 2, 3, 4], [1] * 4)
        assert granted == [1] * 4
        assert len({blocks_of(state, i)[2] for i in (1, 2, 3, 4)}) == 4
        assert state.pool.ref_count[jnp.array(blocks_of(state, 1))].tolist() == [4, 4, 1]

    def test_copy_and_growth_are_granted_together_or_not_at_all(self):
        before = sharers(1)
        state, granted = hold(before, [2], [3])  # a copy and one block more
        assert granted == [0]
        assert_same_bits(state, before)
        before = sharers(2)
        free = free_order(before)
        state, granted = hold(before, [2], [3])
        assert granted == [3]
        assert blocks_of(state, 2) == [*blocks_of(before, 2)[:2], *free]

    @pytest.mark.parametrize("num_free_blocks", range(4))
    @pytest.mark.parametrize("order", [[1, 2, 3, 4], [3, 1, 4, 2]])
    def test_when_blocks_run_out_among_sharers_nobody_writes_a_shared_block(
        self, num_free_blocks, order
    ):
        state, granted = hold(sharers(num_free_blocks), order, [1] * 4)
        # The last may write in place only once the three before it have left.
        assert granted == [1] * num_free_blocks + [0] * (4 - num_free_blocks) or granted == [1] * 4
        assert (granted == [1] * 4) == (num_free_blocks == 3)
        assert_writable(state, order, granted)

    @pytest.mark.parametrize("seed", range(25))
    def test_no_row_is_ever_let_into_a_block_of_another(self, seed):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(5, 12, 2)
        state, _ = seat(
            fresh(), *(Request(i, [i, *PROMPT[: n - 1]]) for i, n in enumerate(lengths, 1))
        )
        state, _ = run(state, [1])
        state, _ = run(state, [2])
        first_children = int(rng.integers(0, 3))
        children = list(range(3, 5))
        parents = [1] * first_children + [2] * (2 - first_children)
        state = reseat(state, parents, children, [0] * 2)
        state = leave_free(state, int(rng.integers(0, 6)))
        for _ in range(3):
            order = rng.permutation(np.arange(1, 5)).tolist()
            num_new = rng.integers(0, 7, 4).tolist()
            before = state
            state, granted = hold(before, order, num_new)
            assert_writable(state, order, granted)
            for i, wanted, got in zip(order, num_new, granted, strict=True):
                assert got in (0, wanted)
                assert contents(state, i) == contents(before, i)
                assert got or blocks_of(state, i) == blocks_of(before, i)

    def test_samples_that_must_wait_for_blocks_draw_what_they_would_have_drawn(self):
        options = {"temperature": 1.0, "seed": 3, "max_len": 17}
        roomy, _ = seat(fresh(), Request(1, PROMPT[:10], **options))
        roomy, _ = run(roomy, [1])
        roomy = finish(split(roomy, 1, 2, 3, 4), [1, 2, 3, 4])
        want = [tokens_of(roomy, i) for i in (1, 2, 3, 4)]
        assert len({tuple(tokens) for tokens in want}) == 4

        state, num_waits = sharers(2, **options), 0
        while np.asarray(state.rows.active)[1:5].any():
            is_active = np.asarray(state.rows.active)
            order = [i for i in (2, 4, 1, 3) if is_active[i]]
            state, output = run(state, order)
            num_waits += int((output.granted[: len(order)] == 0).sum())
            if not output.granted.any():
                state = let_go(state, *FILLERS)
        assert num_waits >= 2
        assert [tokens_of(state, i) for i in (1, 2, 3, 4)] == want


def assert_writable(state, row_ids, granted):
    """What a granted row is about to write is its own, and no block with a hash."""
    rows, pool = jax.device_get((state.rows, state.pool))
    for row_id, num in zip(row_ids, granted, strict=True):
        columns = (rows.context_len[row_id] + np.arange(num)) // BLOCK_SIZE
        blocks = rows.block_table[row_id, np.unique(columns)]
        assert (blocks != 0).all()
        assert (pool.ref_count[blocks] == 1).all()
        assert not pool.block_hash[blocks].any()


class TestHashedTail:
    """A row set back by hand into a full block, as when drafts are refused."""

    def set_back(self, *row_ids: int, num_free_blocks: int = 5):
        state = sharers(num_free_blocks, length=8)
        for row_id in row_ids:
            rows = state.rows
            state = state.replace(rows=rows.replace(context_len=rows.context_len.at[row_id].set(6)))
        return state

    def hash_at(self, state, row_id: int, column: int) -> bool:
        return bool(np.any(state.pool.block_hash[blocks_of(state, row_id)[column]]))

    def test_writing_into_it_forgets_its_hash_and_no_other(self):
        before = let_go(self.set_back(1), 2, 3, 4)
        state, granted = hold(before, [1], [1])
        assert granted == [1]
        assert blocks_of(state, 1) == blocks_of(before, 1)
        assert (self.hash_at(state, 1, 0), self.hash_at(state, 1, 1)) == (True, False)
        state, _ = seat(state, Request(5, PROMPT[:9]))
        assert tokens_read(state, 5) == 4

    def test_a_row_that_is_not_served_leaves_it(self):
        before = let_go(self.set_back(1, num_free_blocks=1), 2, 3, 4)
        for num_new in (0, 10):
            state, granted = hold(before, [1], [num_new])
            assert granted == [0]
            assert_same_bits(state, before)

    def test_a_copy_has_no_hash_and_the_original_keeps_its_own(self):
        state, granted = hold(self.set_back(1, 2), [1, 2], [1, 1])
        assert granted == [1, 1]
        hashes = [self.hash_at(state, i, 1) for i in (1, 2, 3)]
        assert hashes == [False, False, True]

    def test_the_last_of_all_holders_forgets_it(self):
        state, granted = hold(self.set_back(1, 2, 3, 4), [1, 2, 3, 4], [1] * 4)
        assert granted == [1] * 4
        assert not any(self.hash_at(state, i, 1) for i in (1, 2, 3, 4))


def tokens_read(state, row_id: int) -> int:
    return int(state.rows.context_len[row_id])


class TestFork:
    def test_blocks_reserved_beyond_the_context_stay_with_the_parent(self):
        state, _ = seat(fresh(), Request(1, PROMPT[:10], max_len=22))
        state, _ = run(state, [1])
        state, _ = hold(state, [1], [10])
        state = split(state, 1, 2, 3)
        assert [len(blocks_of(state, i)) for i in (1, 2, 3)] == [5, 3, 3]
        own = blocks_of(state, 1)[3:]
        state = finish(state, [1, 2, 3])
        assert blocks_of(state, 1)[3:5] == own
        assert tokens_of(state, 1) == tokens_of(state, 2) == tokens_of(state, 3)

    def test_a_child_is_its_parent_but_for_the_sample_index(self):
        options = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "seed": 2**40 + 1, "min_len": 3}
        stops = {
            "eos_id": 49,
            "stop_ids": (48,),
            "max_len": 30,
            "adapter_id": 5,
            "root": (1, 2, 3, 4),
        }
        state, _ = seat(fresh(), Request(1, PROMPT[:10], prompt_len=7, **options, **stops))
        state, _ = run(state, [1])
        state = split(state, 1, 2, 3)
        parent = contents(state, 1)
        assert contents(state, 2) == {**parent, "sample_index": 1}
        assert contents(state, 3) == {**parent, "sample_index": 2}
        assert state.rows.adapter_id[:4].tolist() == [0, 5, 5, 5]

    def test_a_child_lets_go_of_the_blocks_it_held(self):
        state = three_rows(2)
        old = blocks_of(state, 2)
        state = reseat(state, [1], [2], [0])
        assert contents(state, 2) == contents(state, 1)
        assert int(num_free(state.pool)) == 2 + len(old)
        assert free_order(state)[0] == old[2]  # the unhashed one; the full ones are kept for reuse
        assert free_order(state)[-2:] == [old[1], old[0]]

    def test_rows_change_places_in_one_call(self):
        before = three_rows(0)
        state = reseat(before, [1, 2, 3], [2, 3, 1], [0, 0, 0])
        for parent, child in ((1, 2), (2, 3), (3, 1)):
            assert contents(state, child) == contents(before, parent)
            assert blocks_of(state, child) == blocks_of(before, parent)
        np.testing.assert_array_equal(state.pool.ref_count, before.pool.ref_count)
        np.testing.assert_array_equal(state.pool.last_used, before.pool.last_used)

    def test_the_survivors_of_beams_take_all_rows(self):
        before = three_rows(0)
        state = reseat(before, [2, 2, 2], [1, 2, 3], [0, 0, 0])
        assert blocks_of(state, 1) == blocks_of(state, 2) == blocks_of(state, 3)
        assert blocks_of(state, 2) == blocks_of(before, 2)
        assert int(num_free(state.pool)) == 6

    def test_a_stopped_parent_has_stopped_children(self):
        state, _ = seat(fresh(), Request(1, PROMPT[:10], max_len=11))
        state, _ = run(state, [1])
        state = split(state, 1, 2)
        assert state.rows.active[:3].tolist() == [False] * 3


class TestSeatAndRelease:
    def test_a_preempted_row_resumes_from_its_own_blocks(self):
        state, _ = seat(fresh(), Request(1, PROMPT[:10], max_len=24))
        state, _ = run(state, [1])
        state, _ = run_window(state, [1], 5)
        whole = finish(state, [1])
        tokens = tokens_of(state, 1)
        assert len(tokens) == 16
        state, cached = seat(let_go(state, 1), Request(2, tokens, prompt_len=10, max_len=24))
        assert cached == [12]  # 15 tokens had KV: three full blocks
        assert int(state.rows.prompt_len[2]) == 10
        state = finish(state, [2])
        assert tokens_of(state, 2) == tokens_of(whole, 1)
        assert contents(state, 2) == contents(whole, 1)

    def test_rows_seated_in_one_call_share_the_same_prefix(self):
        state, _ = seat(fresh(), Request(1, PROMPT[:10]))
        state, _ = run(state, [1])
        state, cached = seat(let_go(state, 1), *(Request(i, PROMPT[:9]) for i in (1, 2, 3, 4)))
        assert cached == [8] * 4
        blocks = blocks_of(state, 1)
        assert all(blocks_of(state, i) == blocks for i in (2, 3, 4))
        assert state.pool.ref_count[jnp.array(blocks)].tolist() == [4, 4]

    def test_matching_changes_nothing_and_foretells_admission(self):
        state, _ = seat(fresh(), Request(1, PROMPT[:10]))
        state, _ = run(state, [1])
        requests = [Request(2, PROMPT[:9]), Request(3, PROMPT[:8]), Request(4, [9] * 9)]
        asked = admissions(requests, MAX_LEN)
        num_cached, num_revived = jax.jit(match_admissions)(state, asked)
        assert (num_cached.tolist(), num_revived.tolist()) == ([8, 4, 0, 0], [0, 0, 0, 0])
        state = let_go(state, 1)
        num_cached, num_revived = jax.jit(match_admissions)(state, asked)
        assert (num_cached.tolist(), num_revived.tolist()) == ([8, 4, 0, 0], [2, 1, 0, 0])
        assert seat(state, *requests)[1] == [8, 4, 0]

    def test_prompts_narrower_than_a_block_are_seated(self):
        state, num_cached = jax.jit(admit)(fresh(), admissions([Request(1, [5, 6])], 2))
        assert num_cached.tolist() == [0] * 4
        assert tokens_of(check(state), 1) == [5, 6]

    def test_seating_leaves_no_trace_of_the_row_that_was_there(self):
        state, _ = seat(fresh(), Request(1, PROMPT, sample_index=2, temperature=1.0, seed=1))
        state = let_go(finish(state, [1]), 1)
        state = finish(seat(state, Request(1, [7] * 9, max_len=15))[0], [1])
        clean = finish(seat(fresh(), Request(1, [7] * 9, max_len=15))[0], [1])
        assert contents(state, 1) == contents(clean, 1)

    def test_all_rows_are_released_in_row_order(self):
        state = three_rows(2)
        assert_same_bits(jax.jit(release_all)(state), let_go(let_go(state, 1, 2, 3), *FILLERS))

    def test_releasing_empty_rows_changes_nothing(self):
        state = let_go(three_rows(2), 1, 2)
        assert_same_bits(let_go(state, 1, 2, 4), state)


def without_null(state):
    """The state but for what may be written on behalf of nobody: block 0, null row's sampling."""
    kv = tuple(replace(layer, k=layer.k[1:], v=layer.v[1:]) for layer in state.kv)
    return replace(state, kv=kv, sampling=jax.tree.map(lambda x: x[1:], state.sampling))


class TestPadding:
    """Calls that name only the null row."""

    @pytest.mark.parametrize(
        "call",
        [
            lambda s: hold(s, [], [])[0],
            lambda s: hold(s, [0, 0], [5, 5])[0],
            lambda s: seat(s)[0],
            lambda s: seat(s, Request(0, PROMPT, seed=9, temperature=2.0))[0],
            lambda s: run(s, [])[0],
            lambda s: run(s, [], num_decode_rows=2)[0],
            lambda s: run_window(s, [], 2)[0],
            lambda s: reseat(s, [], [], []),
            lambda s: let_go(s),
        ],
        ids=[
            "reserve",
            "reserve much",
            "admit",
            "admit a prompt",
            "step",
            "mixed",
            "window",
            "fork",
            "release",
        ],
    )
    def test_it_changes_nothing(self, call):
        state = three_rows(2)
        after = call(state)
        assert_same_bits(without_null(after), without_null(state))
