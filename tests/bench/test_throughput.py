"""The throughput benchmark on a tiny model: its line of JSON, and that its counts agree."""

import json
from pathlib import Path
from typing import Any

import pytest

from jpaged import cli
from jpaged.bench import machine

MODEL = Path(__file__).resolve().parent.parent / "fixtures" / "arch" / "llama_llama3rope"
WORK = [
    {"id": "a", "prompt_ids": [1, 50, 60, 70], "max_tokens": 9, "n": 1, "temperature": 0.0},
    {"id": "b", "prompt_ids": [1, 51], "max_tokens": 6, "n": 2, "temperature": 1.0},
    {"id": "c", "prompt_ids": [1, 52, 53], "max_tokens": 5, "ignore_eos": True},
]


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "work.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def bench(workload: Path, *options: Any) -> int:
    small = "--max-model-len 64 --max-num-seqs 4 --max-num-batched-tokens 32 --num-decode-steps 4"
    argv = ["bench", "throughput", "--model", MODEL, "--workload", workload, *small.split()]
    return cli.main([str(arg) for arg in [*argv, *options]])


def test_one_line_with_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    workload, out = write(tmp_path, *WORK), tmp_path / "out.jsonl"
    assert bench(workload, "--reps", 2, "--json-out", out) == 0
    printed = capsys.readouterr().out
    (line,) = printed.splitlines()
    assert out.read_text() == printed
    result = json.loads(line)
    assert result["workload"] == "work"
    assert (result["num_requests"], result["num_sequences"]) == (3, 4)
    assert result["num_prompt_tokens"] == 9
    assert result["num_output_tokens"] == 9 + 2 * 6 + 5
    assert result["outputs_ok"] is True
    assert len(result["wall_s_of_reps"]) == len(result["other_cpu_share"]) == 2
    assert result["wall_s"] == pytest.approx(sum(result["wall_s_of_reps"]) / 2, abs=2e-3)
    ratio = result["total_tokens_per_s"] / result["output_tokens_per_s"]
    assert ratio == pytest.approx((26 + 9) / 26, rel=0.01)
    assert result["num_programs"] > 0
    assert result["num_programs_while_measured"] == 0
    assert 0 < result["window_share"] <= 1
    assert result["num_preemptions"] == 0
    assert result["num_kv_blocks"] > 4
    assert result["dtype"] == "float32"
    assert result["peak_rss_mib"] > 50
    assert set(result["versions"]) == {"jpaged", "jax", "python"}


def test_the_limit_cuts_the_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert bench(write(tmp_path, *WORK), "--limit", 1) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_requests"], result["num_output_tokens"]) == (1, 9)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"prompt_ids": [1]}, "an object with prompt_ids and max_tokens"),
        ({"prompt_ids": [1], "max_tokens": 4, "stop": "."}, "an object with prompt_ids"),
        ({"prompt_ids": "one", "max_tokens": 4}, "token ids must be a list"),
        ({"prompt_ids": [1], "max_tokens": 0}, "max_tokens must be from 1"),
        ({"prompt_ids": [1], "max_tokens": None}, "max_tokens must be from 1"),
        ({"prompt_ids": [1], "max_tokens": 4, "n": None}, "n must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, capsys, line: Any, told: str):
    path = write(tmp_path, WORK[0], line)
    assert bench(path) == cli.BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith(f"jpaged: {path}:2: ")
    assert told in error


def test_reps_and_limit_are_whole_numbers(tmp_path: Path, capsys):
    for option in ("--reps", "--limit"):
        with pytest.raises(SystemExit) as stop:
            bench(write(tmp_path, *WORK), option, "0")
        assert stop.value.code == cli.BAD_INPUT
        assert "must be a whole number from 1" in capsys.readouterr().err


def test_the_clock_tells_own_work_from_sleep():
    with machine.LoadClock() as working:
        total = 0
        while machine._own_seconds() - working._own < 0.2:
            total += 1
    assert working.own_share * working.seconds > 0.05
    assert working.seconds >= 0.1
    assert working.other_share is None or working.other_share >= 0
