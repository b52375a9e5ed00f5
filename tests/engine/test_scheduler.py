"""`plan` as a table of cases: what vLLM's scheduler does, in numbers."""

import pytest

from jpaged.engine import scheduler
from jpaged.engine.scheduler import Limits, Plan, Prefill, Waiting
from jpaged.engine.seq_view import GroupView, SeqView

BLOCK_SIZE = 16


def plan(running: list, views: list, limits: Limits) -> Plan:
    """The plan for waiting sequences of which the prefix cache would give these views."""
    return scheduler.plan(running, [candidate(view) for view in views], limits)


def candidate(view) -> Waiting:
    return Waiting(lambda: view, view.keys[: (view.num_tokens - 1) // BLOCK_SIZE])


def waiting(num_tokens: int, max_new: int = 10, **fields) -> SeqView:
    return SeqView(num_tokens, 0, 0, num_tokens + max_new, **fields)


def decoding(num_tokens: int, num_blocks: int, max_new: int = 10, **fields) -> SeqView:
    return SeqView(num_tokens, num_tokens - 1, num_blocks, num_tokens + max_new, **fields)


def limits(**fields) -> Limits:
    defaults = {
        "block_size": BLOCK_SIZE,
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
    assert chosen.admitted == (0, 1)


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
    assert plan([], [cached], limits(free_blocks=3)).admitted == (0,)
    assert plan([], [cached], limits(free_blocks=2)).admitted == ()
    held_by_others = SeqView(33, 32, 2, 40)
    assert plan([], [held_by_others], limits(free_blocks=1)).admitted == (0,)


def test_a_prompt_is_admitted_only_if_all_of_it_fits_but_takes_blocks_by_chunk():
    pair = [waiting(1600), waiting(16)]
    assert plan([], pair[:1], limits(free_blocks=99)).admitted == ()
    chosen = plan([], pair, limits(free_blocks=100, max_num_batched_tokens=1616))
    assert chosen.admitted == (0,)


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


# --- prompts that arrive together ---


def keys(*names: str) -> tuple[bytes, ...]:
    return tuple(name.encode() for name in names)


def test_a_prompt_waits_for_the_blocks_that_another_computes():
    first, same = (waiting(50, keys=keys("a", "ab", end)) for end in ("abc", "abd"))
    other, short = waiting(20, keys=keys("x")), waiting(16, keys=keys("a"))
    chosen = plan([], [first, same, other, short], limits(free_rows=9))
    # A prompt of one block reads nothing from the cache: its last token must run.
    assert chosen.admitted == (0, 2, 3)
    assert prefilled(chosen) == [50, 20, 16]


@pytest.mark.parametrize(("context_len", "is_held"), [(0, True), (31, True), (32, False)])
def test_it_waits_until_the_last_shared_block_is_full(context_len, is_held):
    producer = SeqView(200, context_len, context_len // 16, 210, keys=keys("a", "ab", "abc"))
    reader = SeqView(40, 32, 2, 50, keys=keys("a", "ab"))
    chosen = plan([producer], [reader], limits())
    assert chosen.admitted == (() if is_held else (0,))


def test_nobody_is_looked_up_who_is_held():
    def never():
        raise AssertionError("looked up")

    producer = SeqView(200, 0, 0, 210, keys=keys("a"))
    held = Waiting(never, keys("a"))
    assert scheduler.plan([producer], [held], limits()).admitted == ()


# --- watermark ---


def test_admissions_leave_the_watermark_free_but_for_the_first():
    few = limits(free_blocks=12, watermark_blocks=3)
    assert plan([], [waiting(160), waiting(16)], few).admitted == (0,)
    assert plan([decoding(5, 1)], [waiting(160)], few).admitted == ()
    assert plan([decoding(5, 1)], [waiting(144)], few).admitted == (0,)
    alone = limits(free_blocks=10, watermark_blocks=3)
    assert plan([], [waiting(160)], alone).admitted == (0,)


# --- beams ---


def group(num_tokens: int, context_len: int, **fields) -> GroupView:
    num_blocks = -(-context_len // BLOCK_SIZE)
    return GroupView(num_tokens, context_len, num_blocks, num_tokens + 20, **fields)


def test_a_group_takes_all_its_rows_and_leaves_the_last_token():
    chosen = plan([], [group(40, 0, num_rows=3), waiting(5)], limits(free_rows=3))
    assert chosen == Plan(admitted=(0,), prefill=(Prefill(0, 39),))
    assert plan([], [group(40, 0, num_rows=4)], limits(free_rows=3)).admitted == ()


@pytest.mark.parametrize(
    ("view", "after_one", "after_two"),
    [
        (group(40, 39, num_rows=4), 0, 3),  # the leader writes; then all, into its block's copies
        (group(33, 32, num_rows=4), 1, 4),  # one block for the leader, three copies
        (group(32, 31, num_rows=4), 0, 4),  # the shared block is full; then one each
        (group(40, 39, num_rows=4, num_live=4, num_tails=3), 1, 1),
        (group(40, 39, num_rows=4, num_live=4, num_tails=4), 0, 0),
        (group(33, 32, num_rows=4, num_live=4, num_tails=0), 4, 4),
    ],
)
def test_blocks_of_a_beam_window(view, after_one, after_two):
    assert [view.window_blocks(n, BLOCK_SIZE) for n in (1, 2)] == [after_one, after_two]


def test_no_threshold_is_too_low_for_a_group():
    ready = group(40, 39, num_rows=4, num_live=4, num_tails=4)
    assert plan([ready], [], limits(long_prefill_token_threshold=3)).beams == (0,)


def test_a_group_without_blocks_is_preempted():
    ready = group(40, 39, num_rows=4, num_live=4, num_tails=4)
    assert plan([ready], [], limits(free_blocks=0)).beams == (0,)
    at_an_end = group(33, 32, num_rows=4, num_live=4, num_tails=0)
    assert plan([at_an_end], [], limits(free_blocks=3)).preempt
    chosen = plan([at_an_end], [], limits(free_blocks=4, num_decode_steps=8))
    assert (chosen.beams, chosen.num_beam_steps) == ((0,), 8)


@pytest.mark.parametrize(
    ("beam_len", "num_blocks"),
    [
        (40, 6),  # three that the leader reads into, and three copies of the last
        (49, 10),  # three copies as well, and then one block each
        (50, 10),  # the same, to know their own tokens
    ],
)
def test_an_interrupted_group_comes_back_when_all_its_beams_have_blocks(beam_len, num_blocks):
    back = group(40, 0, num_rows=4, num_beams=4, beam_len=beam_len, num_tails=4)
    others = [decoding(5, 1)]
    enough, too_few = (limits(free_rows=4, free_blocks=n) for n in (num_blocks, num_blocks - 1))
    assert plan(others, [back], enough).admitted == (0,)
    assert plan(others, [back], too_few).admitted == ()
