"""The latency benchmarks on a tiny model, and that their figures follow from when tokens came."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jpaged import cli
from jpaged.bench.serve import arrivals
from jpaged.bench.timing import RequestTimes, summarize
from tests.bench.test_throughput import MODEL, WORK, write

SMALL = "--max-model-len 64 --max-num-seqs 4 --max-num-batched-tokens 32 --num-decode-steps 4"


def bench(what: str, *options: Any) -> int:
    argv = ["bench", what, "--model", MODEL, *SMALL.split(), *options]
    return cli.main([str(arg) for arg in argv])


def check_order(result: dict[str, Any]) -> None:
    for name in ("ttft", "tpot", "itl", "e2el"):
        median, p90, p99 = (result[f"{word}_{name}_ms"] for word in ("median", "p90", "p99"))
        assert 0 < median <= p90 <= p99
    assert result["median_ttft_ms"] < result["median_e2el_ms"]


def test_equal_requests_in_batches(capsys: pytest.CaptureFixture[str]):
    sizes = {"--input-len": 4, "--output-len": 6, "--batch-size": 2, "--num-iters": 3}
    sizes |= {"--num-iters-warmup": 1}
    assert bench("latency", *(part for size in sizes.items() for part in size)) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    check_order(result)
    assert result["workload"] is None
    assert (result["num_iters"], result["num_requests"], result["batch_size"]) == (3, 2, 2)
    assert (result["num_prompt_tokens"], result["num_output_tokens"]) == (8, 12)
    assert result["outputs_ok"] is True
    assert result["num_programs_while_measured"] == 0
    assert len(result["wall_s_of_reps"]) == len(result["other_cpu_share"]) == 3
    assert result["implementation"] in ("xla", "native")
    assert (result["dtype"], result["quantization"]) == ("float32", None)


def test_a_workload_one_request_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    once = ("--num-iters", 1, "--num-iters-warmup", 1)
    assert bench("latency", "--workload", write(tmp_path, *WORK), *once) == 0
    result = json.loads(capsys.readouterr().out)
    check_order(result)
    assert (result["workload"], result["batch_size"]) == ("work", 1)
    assert (result["num_requests"], result["num_output_tokens"]) == (3, 9 + 2 * 6 + 5)


def test_random_prompts_have_a_length_and_workloads_their_own(tmp_path: Path, capsys):
    workload = write(tmp_path, *WORK)
    assert bench("latency", "--workload", workload, "--input-len", 4) == cli.BAD_INPUT
    assert "--input-len is for random prompts" in capsys.readouterr().err


def test_requests_that_arrive_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    workload = write(tmp_path, *WORK, *WORK)
    goals = ("--goodput", "ttft:60000", "e2el:0.001")
    assert bench("serve", "--workload", workload, "--request-rate", 50, *goals) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    check_order(result)
    assert result["outputs_ok"] is True
    assert (result["num_requests"], result["num_output_tokens"]) == (6, 2 * (9 + 2 * 6 + 5))
    assert result["requests_per_s"] == pytest.approx(6 / result["wall_s"], rel=0.01)
    assert result["wall_s"] >= arrivals(6, 50, 0)[-1]
    assert result["goodput"] == {"ttft": 60000, "e2el": 0.001}
    assert result["good_requests_per_s"] == 0  # nobody ends within a microsecond
    assert result["request_rate"] == 50


def test_all_at_once_with_every_output_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    goals = ("--output-len", 1, "--goodput", "ttft:60000")
    assert bench("serve", "--workload", write(tmp_path, *WORK), *goals) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_output_tokens"] == 4
    assert result["median_tpot_ms"] is None  # there is nothing between one token
    assert result["request_rate"] == "inf"
    assert result["good_requests_per_s"] == result["requests_per_s"] > 0


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--request-rate", "0", "must be a number above 0, or inf, got '0'"),
        ("--request-rate", "fast", "must be a number above 0"),
        ("--goodput", "ttfb:3", "'ttfb:3' is no goal; write NAME:MS"),
        ("--goodput", "ttft", "must be a number above 0"),
    ],
)
def test_a_wrong_rate_or_goal_is_told(tmp_path: Path, capsys, option, value, told):
    with pytest.raises(SystemExit) as stop:
        bench("serve", "--workload", write(tmp_path, *WORK), option, value)
    assert stop.value.code == cli.BAD_INPUT
    assert told in capsys.readouterr().err


def test_arrivals_are_a_seeded_poisson_process():
    times = arrivals(4000, 20.0, 3)
    assert times == arrivals(4000, 20.0, 3) != arrivals(4000, 20.0, 4)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.06)  # as of exponential gaps
    assert arrivals(3, math.inf, 0) == [0.0, 0.0, 0.0]


def test_latencies_follow_from_when_outputs_came():
    times = RequestTimes(10.0)
    for index, num_new, now in [(0, 1, 10.5), (1, 1, 10.6), (0, 4, 11.5), (1, 0, 11.5)]:
        times.add(index, num_new, now)
    times.add(1, 2, 12.6)
    assert times.num_tokens == 8
    wanted = {"ttft": [0.5], "tpot": [0.25, 1.0], "itl": [1.0, 2.0], "e2el": [2.6]}
    for name, seconds in wanted.items():
        assert times.latencies[name] == pytest.approx(seconds)
    assert times.meets({"ttft": 501, "tpot": 1001})
    assert not times.meets({"ttft": 501, "tpot": 999})  # the slower sample counts
    assert times.meets({})
    nothing = RequestTimes(10.0)  # of a model that gives NaN
    assert not nothing.meets({"ttft": 501})
    assert summarize([times, nothing]) == summarize([times])
    assert set(summarize([nothing]).values()) == {None}
    summary = summarize([times])
    assert summary["median_tpot_ms"] == pytest.approx(625)
    assert summary["p90_itl_ms"] == pytest.approx(1900)
    assert summary["p99_e2el_ms"] == pytest.approx(2600)
