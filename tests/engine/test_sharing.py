"""Prompts that arrive together compute what they share once; admissions leave a watermark free."""

import pytest

from jpaged.core.state import check_invariants
from tests.engine.counting import expected, greedy, make_counting_engine

PREFIX = [(5 * i + 3) % 50 for i in range(20)]  # five blocks of four tokens


def make_engine(**options):
    """24 blocks, 6 rows, 16 tokens a step."""
    return make_counting_engine(25, **({"num_decode_steps": 1} | options))


def prompts(num: int) -> list[list[int]]:
    """Prompts that begin alike; their ends differ in length and tokens."""
    return [PREFIX + [40 + place] * (1 + place) for place in range(num)]


def add_all(engine, intake, token_lists, max_tokens: int = 3, **fields) -> list:
    requests = intake.accept(token_lists, greedy(max_tokens, **fields))
    for request in requests:
        engine.add(request)
    return requests


def progress(requests) -> list[int]:
    return [request.samples[0].context_len for request in requests]


def finish_and_check(engine, requests) -> None:
    """Runs to the end: everyone has their own tokens, and no block is left behind."""
    while engine.has_unfinished:
        engine.step()
    check_invariants(engine._device.state)
    assert engine.num_free_blocks == engine.num_blocks - 1
    for request in requests:
        sample, prompt = request.samples[0], request.prompt_token_ids
        if sample.finish_reason != "abort":
            assert sample.output_ids == expected(prompt, request.params.max_tokens)


@pytest.mark.parametrize(
    "options", [{}, {"num_decode_steps": 8}, {"long_prefill_token_threshold": 7}], ids=str
)
def test_a_common_prefix_is_computed_once(options):
    engine, intake = make_engine(**options)
    requests = add_all(engine, intake, prompts(6))
    finish_and_check(engine, requests)
    assert engine.stats.num_prefill_tokens == len(PREFIX) + sum(range(1, 7))
    assert [request.num_cached_tokens for request in requests] == [0] + [len(PREFIX)] * 5


def test_without_prefix_caching_nobody_is_held_back():
    engine, intake = make_engine(enable_prefix_caching=False)
    requests = add_all(engine, intake, [[*PREFIX[:4], place] for place in range(3)])
    engine.step()
    assert progress(requests) == [5, 5, 5]


def test_others_pass_those_held_and_these_keep_their_places():
    engine, intake = make_engine()
    first, held, late = add_all(engine, intake, prompts(3))
    (other,) = add_all(engine, intake, [[7] * 5])
    engine.step()
    assert progress([first, held, late, other]) == [16, 0, 0, 0]  # the budget is spent
    engine.step()
    assert progress([first, held, late, other]) == [21, 0, 0, 5]
    engine.step()
    assert progress([first, held, late, other]) == [22, 22, 23, 6]
    finish_and_check(engine, [first, held, late, other])


def test_they_wait_for_the_block_they_share_and_no_longer():
    """A long prompt is read in chunks; who begins with its first two blocks runs once these are
    full."""
    engine, intake = make_engine(long_prefill_token_threshold=6)
    long = [(3 * i + 1) % 50 for i in range(44)]
    producer, reader = add_all(engine, intake, [long, [*long[:8], 49]])
    seen = []
    for _ in range(3):
        engine.step()
        seen.append(progress([producer, reader]))
    assert seen == [[6, 0], [12, 0], [18, 9]]
    assert reader.num_cached_tokens == 8
    finish_and_check(engine, [producer, reader])


def test_they_are_let_go_when_the_producer_is_aborted():
    engine, intake = make_engine(long_prefill_token_threshold=10)
    first, second, third = add_all(engine, intake, prompts(3))
    engine.step()
    assert progress([first, second, third]) == [10, 0, 0]
    engine.abort([first])
    engine.step()
    # Two blocks had been filled. The next in line computes the others, and now it is waited for.
    assert second.num_cached_tokens == 8
    assert progress([second, third]) == [18, 0]
    finish_and_check(engine, [first, second, third])
    assert third.num_cached_tokens == len(PREFIX)
    assert engine.stats.num_prefill_tokens == 10 + (22 - 8) + (23 - 20)


def test_they_are_let_go_when_the_producer_is_preempted():
    """Three rows that decode take the blocks which the producer's next chunk would need."""
    engine, intake = make_engine(long_prefill_token_threshold=2)
    old = add_all(engine, intake, [[place] * 20 for place in range(3)], max_tokens=12)
    while progress(old) != [20] * 3:
        engine.step()
    producer, held = add_all(engine, intake, prompts(2))
    engine.step()
    # There would be blocks and a row for the second as well.
    assert (engine.num_free_blocks, engine.roster.num_free_rows) == (5, 2)
    while not engine.stats.num_preemptions:
        assert progress([held]) == [0]
        engine.step()
    assert list(engine.roster.waiting) == [*producer.samples, *held.samples]
    finish_and_check(engine, [*old, producer, held])
    assert held.num_cached_tokens == len(PREFIX)


def test_who_does_not_read_the_cache_neither_waits_nor_is_waited_for():
    engine, intake = make_engine()
    prompt = PREFIX[:5]
    (blind,) = add_all(engine, intake, [prompt], skip_reading_prefix_cache=True)
    first, held = add_all(engine, intake, [prompt, prompt])
    (also_blind,) = add_all(engine, intake, [prompt], skip_reading_prefix_cache=True)
    engine.step()
    assert progress([blind, first, held, also_blind]) == [5, 5, 0, 5]
    finish_and_check(engine, [blind, first, held, also_blind])
    cached = [request.num_cached_tokens for request in (blind, first, held, also_blind)]
    assert cached == [0, 0, 4, 0]


def test_another_salt_is_not_waited_for():
    engine, intake = make_engine()
    salted = [{"prompt_token_ids": PREFIX[:5], "cache_salt": salt} for salt in "aba"]
    requests = add_all(engine, intake, salted)
    engine.step()
    assert progress(requests) == [5, 5, 0]
    finish_and_check(engine, requests)


@pytest.mark.parametrize(("watermark", "num_admitted"), [(0.0, 5), (0.2, 3), (0.28, 1), (0.9, 0)])
def test_admissions_leave_the_watermark_free_while_others_run(watermark, num_admitted):
    engine, intake = make_engine(watermark=watermark)
    # Alone it is admitted whatever the watermark. Of 24 blocks it holds 15, and takes one more.
    old = add_all(engine, intake, [[9] * 60], max_tokens=4)
    while progress(old) != [60]:
        engine.step()
    requests = add_all(engine, intake, [[place] * 3 for place in range(5)])
    engine.step()
    assert engine.num_free_blocks == 8 - num_admitted
    assert progress(requests) == [3] * num_admitted + [0] * (5 - num_admitted)
    finish_and_check(engine, old + requests)


@pytest.mark.parametrize(("watermark", "preempts"), [(0.0, True), (0.4, False)])
def test_a_watermark_saves_preemptions(watermark, preempts):
    """Five requests of three blocks that grow to six; four of them fit."""
    engine, intake = make_engine(watermark=watermark)
    requests = add_all(engine, intake, [[place] * 12 for place in range(5)], max_tokens=12)
    finish_and_check(engine, requests)
    assert (engine.stats.num_preemptions > 0) == preempts
