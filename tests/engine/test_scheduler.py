"""`plan` as a table of cases: what vLLM's scheduler does, in numbers."""

import pytest

from jpaged.engine.scheduler import Limits, Plan, Prefill, SeqView, plan


def waiting(num_tokens: int, max_new: int = 10, **fields) -> SeqView:
    return SeqView(num_tokens, 0, 0, num_tokens + max_new, **fields)


def decoding(num_tokens: int, num_blocks: int, max_new: int = 10, **fields) -> SeqView:
    return SeqView(num_tokens, num_tokens - 1, num_blocks, num_tokens + max_new, **fields)


def limits(**fields) -> Limits:
    defaults = {
        "block_size": 16,
        "max_num_batched_tokens": 1024,
        "num_decode_steps": 1,
        "free_rows": 3,
        "free_blocks": 1000,
    }
    return Limits(**(defaults | fields))


def prefilled(chosen: Plan) -> list[int]:
    return [row.num_new for row in chosen.prefill]


def test_a_prompt_is_cut_where_the_budget_ends():
    chosen = plan([], [waiting(n) for n in (800, 800, 10, 10)], limits())
    assert prefilled(chosen) == [800, 224]
    assert chosen.num_admitted == 2


def test_a_long_prompt_takes_no_more_than_the_threshold():
    chosen = plan([], [waiting(800)] * 3, limits(long_prefill_token_threshold=400))
    assert prefilled(chosen) == [400, 400, 224]


def test_running_rows_come_first_and_waiting_ones_get_the_rest():
    running = [decoding(50, 4), SeqView(800, 224, 14, 810)]
    chosen = plan(running, [waiting(900)], limits())
    assert chosen.decode == (0,)
    assert chosen.prefill == (Prefill(1, 576), Prefill(2, 1024 - 1 - 576))


def test_the_youngest_is_preempted_when_blocks_run_out():
    # Two prompts of 80 tokens fill ten blocks of 16; the first needs an eleventh.
    running = [decoding(81, 5), decoding(81, 5)]
    assert plan(running, [], limits(free_blocks=0)) == Plan(preempt=True)
    alone = plan(running[:1], [waiting(82)], limits(free_blocks=5, may_admit=False))
    assert alone == Plan(decode=(0,))


def test_nobody_passes_a_waiting_request_that_does_not_fit():
    chosen = plan([], [waiting(160), waiting(16)], limits(free_blocks=9))
    assert chosen == Plan()


def test_cached_blocks_that_are_free_count_as_taken():
    cached = SeqView(33, 32, 2, 40, num_free_hits=2)
    assert plan([], [cached], limits(free_blocks=3)).num_admitted == 1
    assert plan([], [cached], limits(free_blocks=2)).num_admitted == 0
    held_by_others = SeqView(33, 32, 2, 40)
    assert plan([], [held_by_others], limits(free_blocks=1)).num_admitted == 1


def test_a_prompt_is_admitted_only_if_all_of_it_fits_but_takes_blocks_by_chunk():
    pair = [waiting(1600), waiting(16)]
    assert plan([], pair[:1], limits(free_blocks=99)).num_admitted == 0
    chosen = plan([], pair, limits(free_blocks=100, max_num_batched_tokens=1616))
    assert chosen.num_admitted == 1


@pytest.mark.parametrize(
    ("free_blocks", "max_new", "num_steps"),
    [(2, 10, 8), (1, 10, 1), (0, 10, 1), (0, 1, 1), (2, 1, 1)],
)
def test_a_window_needs_its_blocks_and_someone_to_use_it(free_blocks, max_new, num_steps):
    running = [decoding(16, 1, max_new), decoding(16, 1, max_new)]
    chosen = plan(running, [], limits(num_decode_steps=8, free_blocks=free_blocks))
    assert chosen == Plan(decode=(0, 1), num_steps=num_steps)


def test_a_window_reserves_no_more_than_a_row_can_use():
    running = [decoding(16, 1, max_new=1), decoding(10, 1, max_new=5)]
    chosen = plan(running, [], limits(num_decode_steps=8, free_blocks=0))
    assert chosen.num_steps == 8


def test_copy_on_write_is_counted():
    shared = decoding(20, 2, is_tail_shared=True)
    assert plan([shared], [], limits(free_blocks=0)).preempt
    assert plan([shared], [], limits(free_blocks=1)).decode == (0,)
    at_a_block_end = SeqView(17, 16, 1, 30, is_tail_shared=True)
    assert plan([at_a_block_end], [], limits(free_blocks=1)).decode == (0,)


def test_forks_take_free_rows_once_the_prompt_is_read():
    chosen = plan([], [waiting(20, num_forks=4)], limits())
    assert chosen.prefill == (Prefill(0, 20, num_forks=2),)
    chunk = plan([], [waiting(2000, num_forks=4)], limits())
    assert chunk.prefill == (Prefill(0, 1024, num_forks=0),)
    last_token = SeqView(20, 19, 2, 30, num_forks=1)
    assert plan([last_token], [], limits()).prefill == (Prefill(0, 1, num_forks=1),)


def test_no_row_no_admission():
    assert plan([decoding(5, 1)], [waiting(5)], limits(free_rows=0)) == Plan(decode=(0,))
