"""The memory benchmark on a tiny model, and that what it averages is what was there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jpaged import BeamSearchParams, SamplingParams, cli
from jpaged.engine.usage import CacheUsage, UsageMeter
from tests.bench.test_throughput import MODEL, WORK, write
from tests.engine.counting import greedy, make_counting_engine, run
from tests.engine.test_sliding_window import Windowed


def bench(workload: Path, *options: Any) -> dict[str, Any]:
    small = "--max-model-len 64 --max-num-seqs 4 --max-num-batched-tokens 32 --num-decode-steps 4"
    argv = ["bench", "memory", "--model", MODEL, "--workload", workload, *small.split(), *options]
    assert cli.main([str(arg) for arg in argv]) == 0


def test_one_line_with_waste_and_sharing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bench(write(tmp_path, *WORK))
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert 0 < result["waste"] < 1
    assert 0 < result["sharing"] < 1  # two samples of one prompt
    assert result["num_prefill_tokens"] == result["num_prompt_tokens"] == 9
    assert result["num_decode_steps"] == 4
    assert result["num_held_blocks_at_end"] == 0
    assert (result["num_requests"], result["num_sequences"]) == (3, 4)


def test_beam_searches_read_each_prompt_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bench(write(tmp_path, *WORK), "--beam-width", 2)
    result = json.loads(capsys.readouterr().out)
    assert result["num_prefill_tokens"] == result["num_prompt_tokens"] == 9
    assert result["beam_width"] == 2
    assert result["num_sequences"] == 6


def usage(**counts: int) -> CacheUsage:
    fields = {"block_size": 4, "num_blocks": 20, "num_free": 14, "num_held": 6, "num_cached": 2}
    fields |= {"num_shared": 1, "num_entries": 8, "num_kv_tokens": 21}
    return CacheUsage(**(fields | counts))


def test_waste_and_sharing_are_what_their_names_say():
    assert usage().waste == pytest.approx(1 - 21 / 24)
    assert usage().sharing == pytest.approx(1 - 6 / 8)
    empty = usage(num_held=0, num_entries=0, num_kv_tokens=0)
    assert (empty.waste, empty.sharing) == (0, 0)


def test_each_pass_of_a_window_is_weighed_with_the_kv_it_had():
    meter = UsageMeter()
    meter.record(usage(num_held=4, num_entries=6, num_kv_tokens=14), [0])
    meter.record(usage(), [2, 1])
    passes = [(14, 4, 6), (20, 6, 8), (21, 6, 8)]
    assert meter.num_passes == len(passes)
    assert meter.waste == pytest.approx(np.mean([1 - kv / (4 * held) for kv, held, _ in passes]))
    assert meter.sharing == pytest.approx(np.mean([1 - held / n for _, held, n in passes]))
    assert meter.peak_held == 6


class Passes(UsageMeter):
    """Keeps what it averages."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _add(self, usage: CacheUsage) -> None:
        self.seen.append(usage)
        super()._add(usage)


@pytest.mark.slow
def test_a_prompt_beside_beams_is_weighed_with_its_own_blocks():
    """Not with the KV that the beams' window wrote after it, into blocks it took after it."""
    engine, intake = make_counting_engine(max_num_batched_tokens=64)
    engine.meter = meter = Passes()
    (search,) = intake.accept_beams(list(range(8)), BeamSearchParams(beam_width=4, max_tokens=30))
    engine.add(search)
    engine.step()
    (request,) = intake.accept([9] * 40, greedy(2))
    run(engine, [request])
    leader, prompt = (one for one in meter.seen if one.num_kv_tokens in (7, 47))
    assert (leader.num_held, leader.num_entries) == (2, 2)
    assert (prompt.num_held, prompt.num_entries) == (12, 12)
    assert all(0 <= one.waste < 1 and 0 <= one.sharing < 1 for one in meter.seen)


@pytest.mark.slow
def test_no_pass_has_less_kv_than_none_where_blocks_are_given_back():
    """A row writes more tokens in twelve steps than its blocks hold in the end."""
    windowed = Windowed(num_decode_steps=12)
    windowed.engine.meter = meter = Passes()
    windowed.run(*windowed.intake.accept([1, 2, 3], greedy(30)))
    assert len(meter.seen) == 30
    assert all(0 <= one.waste < 1 for one in meter.seen)


def test_a_snapshot_counts_blocks_by_what_they_are_for():
    engine, intake = make_counting_engine(num_decode_steps=1)
    sampled = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8)
    (request,) = intake.accept([1, 2, 3, 4, 5, 6], sampled)
    engine.add(request)
    engine.step()
    # One full block and a partly filled one, both of all three rows.
    cache = engine.snapshot().cache
    assert (cache.num_held, cache.num_shared, cache.num_entries) == (2, 2, 6)
    assert cache.num_kv_tokens == 6
    engine.step()
    cache = engine.snapshot().cache
    # Each row has its own copy of the second, with its own token.
    assert (cache.num_held, cache.num_shared, cache.num_entries) == (4, 1, 6)
    assert cache.num_kv_tokens == 4 + 3 * 3
    while engine.has_unfinished:
        engine.step()
    end = engine.snapshot()
    assert (end.num_running, end.cache.num_held, end.cache.num_kv_tokens) == (0, 0, 0)
    assert end.cache.num_free == end.cache.num_blocks
    assert end.cache.num_cached > 0
    assert end.stats.num_prefill_tokens == 6


@pytest.mark.parametrize("kind", ["samples", "beams"])
def test_the_prompts_blocks_exist_once(kind: str):
    engine, intake = make_counting_engine(num_decode_steps=2)
    prompt = list(range(1, 18))  # four full blocks and one token
    if kind == "beams":
        (request,) = intake.accept_beams(prompt, BeamSearchParams(beam_width=6, max_tokens=12))
    else:
        params = SamplingParams(n=6, temperature=1.0, seed=2, max_tokens=12)
        (request,) = intake.accept(prompt, params)
    engine.add(request)
    num_steps = 0
    while engine.has_unfinished:
        engine.step()
        num_steps += 1
        rows = engine._device.state.rows
        tables = np.asarray(rows.block_table)[np.asarray(rows.num_blocks) > 4]
        assert (tables[:, :4] == tables[:1, :4]).all()
    assert num_steps > 4
    assert engine.stats.num_prefill_tokens == len(prompt)


def test_a_run_that_is_metered_gives_the_same_tokens():
    prompts, answers = [[1, 2, 3], [4] * 9], []
    for meter in (None, UsageMeter()):
        engine, intake = make_counting_engine()
        engine.meter = meter
        requests = intake.accept(prompts, greedy(12))
        run(engine, requests)
        answers.append([request.samples[0].output_ids for request in requests])
    assert answers[0] == answers[1]
