"""Comparison with other engines: how peers are named, what is run, and how figures are joined."""

import argparse
import ast
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
WORKERS = sorted((SCRIPTS / "peers").glob("*.py"))
MANY = [{"prompt_ids": [1, 9], "max_tokens": 3, "n": 2, "temperature": 0.5, "ignore_eos": True}] * 5
STREAM = [{"id": "a", "prompt_ids": [1, 2, 3, 9], "max_tokens": 9}]
PROMPTS = [{"prompt_ids": [1, 9] * 20, "max_tokens": 2}] * 3


@pytest.fixture
def bench_peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bench_peers")


@pytest.fixture
def measuring(bench_peers: ModuleType) -> ModuleType:
    return importlib.import_module("peers.measuring")


def write(path: Path, lines: list) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_peer_has_a_name_and_may_have_a_python_and_a_model(bench_peers: ModuleType):
    plain = bench_peers.read_peer("hf-static16")
    assert plain == ("hf-static16", sys.executable, None)
    assert plain.label == "hf-static16"
    other = bench_peers.read_peer(f"openvino={sys.executable},model=some/tiny.gguf")
    assert other == ("openvino", sys.executable, "some/tiny.gguf")
    assert other.label == "openvino tiny"
    assert bench_peers.read_peer("llama-cpp,model=x.gguf").python == sys.executable


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tgi", "'tgi' is no peer; there are hf-static16"),
        ("vllm=/no/such/python", "/no/such/python is no program"),
        ("vllm,dtype=float32", "write NAME=PYTHON,model=PATH"),
    ],
)
def test_a_wrong_peer_is_told(bench_peers: ModuleType, text: str, told: str):
    with pytest.raises(argparse.ArgumentTypeError, match=told):
        bench_peers.read_peer(text)


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (MANY, [["throughput"]]),
        (STREAM, [["latency", "--num-iters", "3", "--num-iters-warmup", "1"]]),
        (PROMPTS, [["throughput"], ["throughput", "--output-len", "1", "--reps", "3"]]),
    ],
)
def test_what_runs_follows_from_the_workload(bench_peers, tmp_path: Path, lines, wanted):
    workload = write(tmp_path / "w.jsonl", lines)
    args = argparse.Namespace(model="m", dtype="bfloat16", limit=4)
    peers = [bench_peers.read_peer("hf-sequential"), bench_peers.read_peer("vllm,model=other")]
    commands = bench_peers.turns(args, workload, peers, ["--block-size", "32"])
    assert list(commands) == ["jpaged", "hf-sequential", "vllm other"]
    options = ["--workload", str(workload), "--dtype", "bfloat16", "--limit", "4"]
    start = [sys.executable, "-m", "jpaged.cli", "bench"]
    assert commands["jpaged"] == [
        [*start, what, "--model", "m", *options, *own, "--block-size", "32"]
        for what, *own in wanted
    ]
    ((python, script, *rest),) = commands["hf-sequential"]
    assert (python, Path(script).name) == (sys.executable, "run_transformers.py")
    assert rest == ["--batch-size", "1", "--model", "m", *options]
    assert commands["vllm other"][0][2:4] == ["--model", "other"]
    assert all(Path(command[1]).is_file() for [command] in list(commands.values())[1:])


def result(speed: float, **figures) -> dict:
    return {"output_tokens_per_s": speed, "outputs_ok": True, "other_cpu_share": [0.1]} | figures


def test_medians_over_rounds(bench_peers: ModuleType):
    rounds = [result(9.0, peak_rss_mib=5), result(1.0, peak_rss_mib=7), result(4.0, peak_rss_mib=6)]
    rounds[1]["outputs_ok"] = False
    median = bench_peers.summary(rounds)
    assert (median["output_tokens_per_s"], median["peak_rss_mib"]) == (4.0, 6)
    assert median["output_tokens_per_s_of_rounds"] == [9.0, 1.0, 4.0]
    assert median["other_cpu_share"] == [0.1] * 3
    assert median["outputs_ok"] is False
    assert "ms_per_output_token" not in median


def test_ratios_say_how_many_times_as_fast_we_are(bench_peers: ModuleType):
    medians = {
        "jpaged": result(90.0, ms_per_output_token=10.0, prompt_tokens_per_s=500.0),
        "a": result(30.0, ms_per_output_token=25.0, prompt_tokens_per_s=1000.0),
        "b": result(180.0),
    }
    assert bench_peers.ratios(medians) == {
        "a": {"output_tokens_per_s": 3.0, "prompt_tokens_per_s": 0.5, "ms_per_output_token": 2.5},
        "b": {"output_tokens_per_s": 0.5},
    }
    assert bench_peers.ratios({"a": medians["a"]}) == {"a": {}}  # ours failed


def test_our_runs_are_joined_under_the_peers_names(bench_peers: ModuleType):
    stream = bench_peers.merge([result(50.0, median_tpot_ms=20.0)])
    assert stream["ms_per_output_token"] == 20.0
    first_tokens = result(3.0, num_prompt_tokens=900, wall_s=1.5)
    prompts = bench_peers.merge([result(7.0, wall_s=4.0), first_tokens])
    assert prompts["prompt_tokens_per_s"] == 600
    assert prompts["output_tokens_per_s"] == 7.0


def test_a_failed_run_fails_no_other(bench_peers, tmp_path: Path, monkeypatch, capsys):
    workload = write(tmp_path / "w.jsonl", MANY)
    good = f"print('noise'); print('{json.dumps(result(8.0))}')"

    def turns(*_):
        return {
            "jpaged": [[sys.executable, "-c", good]],
            "silent": [[sys.executable, "-c", ""]],
            "broken": [[sys.executable, "-c", "raise SystemExit(3)"]],
            "killed": [[sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]],
            "gone": [["/no/such/python"]],
            "hanging": [[sys.executable, "-c", "import time; time.sleep(60)"]],
            "silent of figures": [[sys.executable, "-c", "print(3)"]],
        }

    monkeypatch.setattr(bench_peers, "turns", turns)
    monkeypatch.setattr(bench_peers.signal, "signal", lambda *_: None)
    argv = ["bench_peers", "--model", "m", "--workload", str(workload), "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", [*argv, "--timeout", "3"])
    assert bench_peers.main() == 1
    told = capsys.readouterr()
    median, ratio = map(json.loads, told.out.splitlines())
    assert (median["engine"], median["workload"]) == ("jpaged", "w")
    assert median["output_tokens_per_s_of_rounds"] == [8.0, 8.0]
    assert ratio == {"workload": "w", "times_as_fast_as": {}}
    for label in ("silent", "broken", "killed", "gone", "hanging", "silent of figures"):
        assert told.err.count(f"{label} failed") == 2


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        (None, [], "No such file"),
        ("\n", [], "has no requests"),
        ("{", [], "w.jsonl: Expecting"),
        ('{"prompt_ids": [1]}', [], "max_tokens"),
        ("[1]", [], "prompt_ids"),
        (json.dumps(STREAM[0]), ["--rounds", "0"], "a whole number from 1"),
        (json.dumps(STREAM[0]), ["--limit", "0"], "a whole number from 1"),
        (json.dumps(STREAM[0]), ["--peer", "vllm", "--peer", "vllm"], "peers must differ"),
    ],
)
def test_what_can_not_be_played_is_told_first(
    bench_peers, tmp_path: Path, monkeypatch, capsys, text: str | None, options, told: str
):
    path = tmp_path / "w.jsonl"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(bench_peers, "play", lambda *_: pytest.fail("it was played"))
    argv = ["bench_peers", "--model", "m", "--workload", str(path), *options]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as stop:
        bench_peers.main()
    assert stop.value.code == 2
    assert told in capsys.readouterr().err


def test_an_interrupted_comparison_tells_what_there_is(
    bench_peers, tmp_path: Path, monkeypatch, capsys
):
    results = iter([result(6.0), result(3.0)])

    def run(command, timeout):
        try:
            return next(results)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(bench_peers, "run", run)
    monkeypatch.setattr(bench_peers.signal, "signal", lambda *_: None)
    workload = write(tmp_path / "w.jsonl", MANY)
    argv = ["bench_peers", "--model", "m", "--workload", str(workload), "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", argv)
    assert bench_peers.main() == 1
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[-1])["times_as_fast_as"] == {
        "hf-static16": {"output_tokens_per_s": 2.0}
    }
    assert "interrupted" in told.err


@pytest.mark.parametrize(
    ("lines", "is_stream", "is_prompt"),
    [(MANY, False, False), (STREAM, True, False), (PROMPTS, False, True)],
)
def test_workers_measure_what_the_workload_is_for(
    measuring, tmp_path: Path, capsys, lines, is_stream: bool, is_prompt: bool
):
    args = argparse.Namespace(
        model="some/m", workload=str(write(tmp_path / "w.jsonl", lines)), dtype="x", limit=None
    )
    calls, prompts = [], []

    def run(requests) -> int:
        calls.append((len(requests), max(one.max_tokens for one in requests)))
        prompts.append(requests[0].prompt_ids)
        return sum(one.n * one.max_tokens for one in requests)

    measuring.measure(args, run, packages=("pytest",), slots=3)
    line = json.loads(capsys.readouterr().out)
    whole = (len(lines), lines[0]["max_tokens"])
    warm_up = (min(len(lines), 4), min(lines[0]["max_tokens"], 4))
    cuts = [(len(lines), 1)] * 3 if is_stream or is_prompt else []
    assert calls == [(1, 1), warm_up, whole, *cuts]
    assert prompts[2] == lines[0]["prompt_ids"]  # in disguise before and after
    assert len({tuple(ids[:2]) for ids in prompts[1:]}) == len(prompts) - 1
    assert ("ms_per_output_token" in line) == is_stream
    assert ("prompt_tokens_per_s" in line) == is_prompt
    num_output = sum(one.get("n", 1) * one["max_tokens"] for one in lines)
    assert line["num_output_tokens"] == num_output
    assert line["num_prompt_tokens"] == sum(len(one["prompt_ids"]) for one in lines)
    assert line["outputs_ok"] is True
    assert (line["workload"], line["model"], line["slots"]) == ("w", "m", 3)
    assert line["cold_start_s"] > 0
    assert line["peak_rss_mib"] > 10
    assert set(line["versions"]) == {"pytest"}


def test_an_engine_that_stops_early_is_found_out(measuring, tmp_path: Path, capsys):
    args = argparse.Namespace(
        model="m", workload=str(write(tmp_path / "w.jsonl", MANY)), dtype="x", limit=2
    )
    sizes = []

    def run(requests) -> int:
        sizes.append(len(requests))
        return 1

    measuring.measure(args, run, packages=(), warms_up_whole=True)
    assert sizes == [1, 2, 2]
    assert json.loads(capsys.readouterr().out)["outputs_ok"] is False


def test_a_disguise_keeps_lengths_ranges_and_shared_prefixes(measuring):
    prompts = [[3, 14, 15, 9, 20], [3, 14, 15, 2], [7] * 6]
    requests = [measuring.Request(ids, 5) for ids in prompts]
    for key in range(1, 8):
        disguised = [one.prompt_ids for one in measuring.disguise(requests, key)]
        assert [len(ids) for ids in disguised] == [5, 4, 6]
        assert all(0 <= token_id <= 20 for ids in disguised for token_id in ids)
        assert disguised[0][:3] == disguised[1][:3]
        assert disguised[0][3] != disguised[1][3]
        assert disguised[0][0] not in (3, disguised[2][0])
    assert measuring.disguise(requests, 0) == requests


def test_workers_know_nothing_of_jpaged():
    assert len(WORKERS) == 5
    for path in WORKERS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] != "jpaged" for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in ("jpaged", "scripts")
