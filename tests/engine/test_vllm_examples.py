"""The examples that vLLM's own tests pin, run by the whole engine: J = 1, block size 16, 11 blocks.

Block 0 is the null block, here as there, so that block ids come out as vLLM's. Pinned elsewhere:
the second example of free orders, and blocks that several rows hold, in tests/core/test_block_pool;
hit lengths of many prompts and what a hash depends on, in test_prefix_cache; the salt, in
test_engine; what `plan` does with numbers alone, in test_scheduler; that the host's counts are the
device's after each step, in test_host_mirror.

jpaged departs from vLLM on purpose in this:

- A block is published when its KV has been computed, not when it is reserved. A prompt that begins
  with a block which another computes is held back until then, and others may pass it; vLLM lets it
  hit at once, in the same step.
- In a step prompts take their blocks first, then the rows that decode. Who is served and who is
  preempted is judged in vLLM's order: running requests before waiting ones.
- Of rows that write into one block all but the last copy it; vLLM shares no partly filled block.
- Prompts are always read in chunks; running requests are never preempted to empty the cache; there
  is no hit rate of the last 1,000 requests, only sums.
"""

import jax
import numpy as np
import pytest

from jpaged.core.block_pool import is_hashed
from jpaged.core.state import check_invariants
from tests.core.small_core import assert_same_bits, free_order
from tests.engine.counting import expected, greedy, make_counting_engine

BLOCK_SIZE = 16
PREFIX = [i % 50 for i in range(48)]


def make_engine(num_blocks: int = 11, **options):
    defaults = {
        "block_size": BLOCK_SIZE,
        "max_position": 1024,
        "max_model_len": 176,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 1024,
        "num_decode_steps": 1,
    }
    return make_counting_engine(num_blocks, **(defaults | options))


def add(engine, intake, prompt: list[int], max_tokens: int = 8, **fields):
    (request,) = intake.accept([prompt], greedy(max_tokens, **fields))
    engine.add(request)
    return request


def read(engine, intake, prompt: list[int], max_tokens: int = 8, **fields):
    """A request whose prompt has been read, and which goes on."""
    request = add(engine, intake, prompt, max_tokens, **fields)
    while not request.samples[0].output_ids:
        engine.step()
    return request


def finish(engine) -> None:
    while engine.has_unfinished:
        engine.step()


def pool_of(engine):
    state = engine._device.state
    check_invariants(state)
    return state.pool


def next_free(engine) -> list[int]:
    """Free blocks, the next to be taken first."""
    pool_of(engine)
    return free_order(engine._device.state)


def blocks_of(engine, request) -> list[int]:
    rows, sample = engine._device.state.rows, request.samples[0]
    return rows.block_table[sample.row_id, : sample.num_blocks].tolist()


def hashes_of(engine, blocks: list[int]) -> list[list[int]]:
    return np.asarray(pool_of(engine).block_hash)[blocks].tolist()


def hashed_blocks(engine) -> list[int]:
    return np.flatnonzero(is_hashed(pool_of(engine))).tolist()


def progress(requests) -> list[int]:
    """Tokens of each that have KV."""
    return [request.samples[0].context_len for request in requests]


class TestFreeOrder:
    def test_a_shared_prefix_and_a_request_for_the_whole_pool(self):
        engine, intake = make_engine()
        assert next_free(engine) == list(range(1, 11))
        first = read(engine, intake, PREFIX + [1] * 7)
        second = read(engine, intake, PREFIX + [2] * 5)
        assert second.num_cached_tokens == 48
        assert blocks_of(engine, first) == [1, 2, 3, 4]
        assert blocks_of(engine, second) == [1, 2, 3, 5]
        assert pool_of(engine).ref_count[:6].tolist() == [1, 2, 2, 2, 1, 1]
        assert engine.num_free_blocks == 5

        engine.abort([first])
        engine.abort([second])
        assert next_free(engine) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
        assert hashed_blocks(engine) == [1, 2, 3]

        third = read(engine, intake, PREFIX + [3] * 6)
        assert third.num_cached_tokens == 48
        assert blocks_of(engine, third) == [1, 2, 3, 5]
        engine.abort([third])

        miss = add(engine, intake, [49] * 160, 1)
        engine.step()
        assert miss.num_cached_tokens == 0
        # Emptied again, tail first: its blocks were taken in the order 5, 4, 6, ..., 1.
        assert next_free(engine) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1][::-1]

    def test_two_cached_blocks_that_are_hit_leave_the_free_list(self):
        engine, intake = make_engine()
        prompt = [i % 50 for i in range(87)]
        first, other = read(engine, intake, prompt), read(engine, intake, [9] * 48)
        assert blocks_of(engine, first) == [1, 2, 3, 4, 5, 6]
        # Its 49th token has no KV yet, hence no block.
        assert blocks_of(engine, other) == [7, 8, 9]
        engine.abort([first])
        engine.abort([other])
        assert next_free(engine) == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
        again = read(engine, intake, prompt[:35])
        assert blocks_of(engine, again) == [1, 2, 6]
        assert next_free(engine) == [10, 5, 4, 3, 9, 8, 7]


class TestBlocks:
    def test_decoding_fills_the_tail_block_and_takes_one_only_when_it_overflows(self):
        engine, intake = make_engine()
        request = read(engine, intake, PREFIX[:30], 20)
        seen = []
        while progress([request]) < [35]:
            seen.append((*progress([request]), len(blocks_of(engine, request))))
            assert hashed_blocks(engine) == list(range(1, 1 + seen[-1][0] // BLOCK_SIZE))
            engine.step()
        assert seen == [(30, 2), (31, 2), (32, 2), (33, 3), (34, 3)]

    def test_a_block_used_again_for_part_of_a_block_loses_its_hash(self):
        engine, intake = make_engine()
        engine.abort([read(engine, intake, PREFIX[:16])])
        assert (hashed_blocks(engine), next_free(engine)[-1]) == ([1], 1)
        part = read(engine, intake, [7] * 150)
        assert blocks_of(engine, part)[-1] == 1
        assert hashed_blocks(engine) == list(range(2, 11))
        engine.abort([part])
        assert hits(engine, intake, PREFIX[:17]) == 0

    def test_a_block_just_hit_is_not_evicted_for_the_same_request(self):
        engine, intake = make_engine()
        for prompt in ([1] * 16, [2] * 144):
            engine.abort([read(engine, intake, prompt)])
        assert next_free(engine) == [1, 10, 9, 8, 7, 6, 5, 4, 3, 2]
        request = read(engine, intake, [1] * 16 + [3] * 13)
        assert request.num_cached_tokens == 16
        assert blocks_of(engine, request) == [1, 10]

    def test_a_request_that_does_not_fit_changes_nothing(self):
        engine, intake = make_engine()
        first = read(engine, intake, PREFIX + [1] * 7)
        other = read(engine, intake, [9] * 48)
        engine.abort([first])
        before = jax.device_get(pool_of(engine))
        # Three hits, all of them free, and five more blocks: of seven free ones, one too many.
        waits = add(engine, intake, PREFIX + [5] * 80, 1)
        other_len = progress([other])
        engine.step()
        assert progress([waits, other]) == [0, other_len[0] + 1]
        after = jax.device_get(pool_of(engine))
        assert after.ref_count[10] == 0
        grown = blocks_of(engine, other)[-1]
        assert grown == 4  # the first free one, whose hash was never set
        assert_same_bits(
            after.replace(ref_count=np.where(np.arange(11) == grown, 0, after.ref_count)), before
        )
        assert waits.num_cached_tokens is None
        finish(engine)
        assert waits.num_cached_tokens == 48
        assert waits.samples[0].output_ids == expected(PREFIX + [5] * 80, 1)


def hits(engine, intake, prompt: list[int]) -> int:
    """Cached tokens of one more request, which ends with its first token."""
    return read(engine, intake, prompt, 1).num_cached_tokens


class TestLookup:
    @pytest.mark.parametrize(("length", "cached"), [(16, 0), (17, 16), (32, 16), (33, 32)])
    def test_one_token_of_a_prompt_always_runs(self, length, cached):
        engine, intake = make_engine()
        prompt = PREFIX[:length]
        assert hits(engine, intake, prompt) == 0
        again = read(engine, intake, prompt)
        assert again.num_cached_tokens == cached
        assert engine.stats.num_prefill_tokens == length + length - cached

    def test_the_last_block_of_an_aligned_prompt_is_computed_into_a_block_of_its_own(self):
        engine, intake = make_engine()
        engine.abort([read(engine, intake, PREFIX[:32])])
        again = read(engine, intake, PREFIX[:32])
        assert blocks_of(engine, again) == [1, 3]
        assert hashes_of(engine, [2]) == hashes_of(engine, [3])

    def test_who_does_not_read_the_cache_computes_all_and_publishes_duplicates(self):
        engine, intake = make_engine()
        first = read(engine, intake, PREFIX, 20)
        blind = read(engine, intake, PREFIX, 20, skip_reading_prefix_cache=True)
        assert blind.num_cached_tokens == 0
        assert (blocks_of(engine, first), blocks_of(engine, blind)) == ([1, 2, 3, 7], [4, 5, 6])
        assert hashes_of(engine, [1, 2, 3]) == hashes_of(engine, [4, 5, 6])
        engine.step()
        # Tables only grow: no block is exchanged for its equal.
        assert blocks_of(engine, blind)[:3] == [4, 5, 6]
        engine.abort([first])
        assert hits(engine, intake, [*PREFIX, 1]) == 48

    def test_what_it_published_serves_others(self):
        engine, intake = make_engine()
        read(engine, intake, PREFIX, skip_reading_prefix_cache=True)
        assert hits(engine, intake, [*PREFIX, 1]) == 48

    def test_prompts_of_one_step_share_from_the_next_step_on(self):
        engine, intake = make_engine()
        first, second = (add(engine, intake, [*PREFIX[:32], last]) for last in (1, 2))
        engine.step()
        assert progress([first, second]) == [33, 0]
        engine.step()
        assert progress([first, second]) == [34, 33]
        assert second.num_cached_tokens == 32
        assert blocks_of(engine, first)[:2] == blocks_of(engine, second)[:2]
        assert engine.stats.num_prefill_tokens == 34

    def test_the_cache_is_emptied_only_when_nobody_runs(self):
        engine, intake = make_engine()
        request = read(engine, intake, PREFIX)
        assert not engine.reset_prefix_cache()
        assert hashed_blocks(engine) == [1, 2, 3]
        engine.abort([request])
        assert engine.reset_prefix_cache()
        assert hashed_blocks(engine) == []
        assert hits(engine, intake, [*PREFIX, 1]) == 0

    def test_without_prefix_caching_nothing_is_found(self):
        engine, intake = make_engine(enable_prefix_caching=False)
        assert [hits(engine, intake, PREFIX) for _ in range(2)] == [0, 0]
        assert (engine.stats.num_cache_queries, engine.stats.num_cache_hits) == (0, 0)
        assert engine.stats.num_prefill_tokens == 2 * len(PREFIX)


class TestCounts:
    def test_queries_and_hits_are_tokens_of_admissions(self):
        engine, intake = make_engine()
        for length in (48, 33, 17):
            hits(engine, intake, PREFIX[:length])
        stats = engine.stats
        assert (stats.num_cache_queries, stats.num_cache_hits) == (48 + 33 + 17, 32 + 16)

    def test_a_prompt_that_waited_for_blocks_is_counted_once(self):
        engine, intake = make_engine()
        read(engine, intake, [9] * 100, 6)
        add(engine, intake, [8] * 80, 1)
        for _ in range(3):
            engine.step()
            assert engine.stats.num_cache_queries == 100
        finish(engine)
        assert (engine.stats.num_cache_queries, engine.stats.num_resumed_queries) == (180, 0)


class TestScheduling:
    def test_a_prompt_is_cut_where_the_budget_ends_and_nobody_passes(self):
        engine, intake = make_engine(num_blocks=200, max_model_len=1024)
        requests = [
            add(engine, intake, [token] * n, 3) for token, n in enumerate((800, 800, 10, 10))
        ]
        engine.step()
        assert progress(requests) == [800, 224, 0, 0]
        assert engine.roster.num_free_rows == 1
        engine.step()
        # One token of the first, 576 of the second; the third row goes to the third request.
        assert progress(requests) == [801, 800, 10, 0]
        finish(engine)
        for request in requests:
            assert request.samples[0].output_ids == expected(request.prompt_token_ids, 3)

    def test_three_long_prompts_share_the_budget_under_the_threshold(self):
        engine, intake = make_engine(
            num_blocks=200, max_model_len=1024, long_prefill_token_threshold=400
        )
        requests = [add(engine, intake, [token] * 800, 3) for token in range(3)]
        seen = []
        for _ in range(3):
            engine.step()
            seen.append(progress(requests))
        assert seen == [[400, 400, 224], [800, 800, 448], [801, 801, 800]]

    def test_whole_prompts_are_read_in_the_first_step_and_all_decode_in_the_next(self):
        engine, intake = make_engine()
        requests = [add(engine, intake, [token] * 20, 5) for token in range(3)]
        engine.step()
        assert progress(requests) == [20] * 3
        assert [len(request.samples[0].output_ids) for request in requests] == [1] * 3
        engine.step()
        assert progress(requests) == [21] * 3

    def test_the_first_that_does_not_fit_stops_the_scan(self):
        engine, intake = make_engine()
        runs = read(engine, intake, [1] * 100, 6)
        large, small = add(engine, intake, [2] * 80, 1), add(engine, intake, [3] * 10, 1)
        engine.step()
        assert progress([large, small]) == [0, 0]
        while runs.samples[0].finish_reason is None:
            assert progress([large, small]) == [0, 0]
            engine.step()
        finish(engine)
        assert large.samples[0].output_ids == expected([2] * 80, 1)


class TestPreemption:
    """Two prompts of 80 tokens fill ten blocks; the first needs an eleventh."""

    def start(self):
        engine, intake = make_engine()
        pair = [add(engine, intake, [token] * 80, 6) for token in (1, 2)]
        engine.step()
        assert [blocks_of(engine, request) for request in pair] == [
            [1, 2, 3, 4, 5],
            [6, 7, 8, 9, 10],
        ]
        assert engine.num_free_blocks == 0
        return engine, intake, *pair

    def test_the_second_gives_its_blocks_back_and_keeps_its_tokens(self):
        engine, _, first, second = self.start()
        tokens = list(second.samples[0].output_ids)
        assert len(tokens) == 1
        engine.step()
        assert engine.stats.num_preemptions == 1
        assert blocks_of(engine, first) == [1, 2, 3, 4, 5, 10]
        assert (progress([second]), second.samples[0].output_ids) == ([0], tokens)
        assert next_free(engine) == [9, 8, 7, 6]
        assert hashed_blocks(engine) == list(range(1, 10))
        assert list(engine.roster.waiting) == second.samples

        finish(engine)
        assert engine.stats.num_preemptions == 1
        for request in (first, second):
            assert request.samples[0].output_ids == expected(request.prompt_token_ids, 6)

    def test_queries_and_hits_of_the_resumed_are_counted_apart(self):
        engine, _, _, second = self.start()
        stats = engine.stats
        assert (stats.num_cache_queries, stats.num_cache_hits) == (160, 0)
        finish(engine)
        assert (stats.num_cache_queries, stats.num_cache_hits) == (160, 0)
        # It comes back with 81 tokens, of which blocks 6 to 9 still hold 64.
        assert (stats.num_resumed_queries, stats.num_resumed_hits) == (81, 64)
        assert second.num_cached_tokens == 0

    def test_nobody_is_admitted_in_the_step_that_preempts(self):
        engine, intake, _, second = self.start()
        short = add(engine, intake, [3] * 10, 1)
        engine.step()
        assert engine.stats.num_preemptions == 1
        assert engine.num_free_blocks == 4
        assert list(engine.roster.waiting) == [*second.samples, *short.samples]
        assert progress([short]) == [0]

    def test_the_youngest_gives_way_to_itself_as_well(self):
        engine, intake = make_engine()
        first = add(engine, intake, [1] * 70, 6)
        youngest = add(engine, intake, [2] * 80, 6)
        engine.step()
        engine.step()
        assert engine.stats.num_preemptions == 1
        assert list(engine.roster.waiting) == youngest.samples
        assert progress([first, youngest]) == [71, 0]
        finish(engine)
        for request in (first, youngest):
            assert request.samples[0].output_ids == expected(request.prompt_token_ids, 6)
