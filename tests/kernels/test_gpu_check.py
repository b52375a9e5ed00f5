"""The scripts for a GPU run on a CPU, in tiny sizes: every part of them, kernels interpreted."""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SLOW = pytest.mark.slow
RIVALS = ("jpaged, XLA", "dot_product_attention", "torch SDPA")

# torch's own way to tell of what it would rather be told; JAX's of kernels that it has given up.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.*:UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Others' kernels do not keep to strict promotion."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def gpu_check() -> ModuleType:
    return importlib.import_module("gpu_check")


@pytest.fixture
def measuring() -> ModuleType:
    return importlib.import_module("gpu.measuring")


@pytest.fixture
def results(tmp_path: Path):
    """A file in which the device has been measured."""
    results = importlib.import_module("gpu.results").Results(tmp_path / "results.json")
    results.begin("device", anew=True)
    told = {"data_sheet": None, "copy_gb_per_s": 10.0, "bf16_tflop_per_s": 0.1}
    results.add("device", told)
    results.finish("device", 1.0)
    return results


def rows_of(gpu_check: ModuleType, results, part: str, seconds: float = 600) -> list[dict]:
    results.begin(part, anew=True)
    assert gpu_check.run_part(part, results, is_smoke=True, seconds=seconds) == 0
    return results.rows(part)


@pytest.mark.parametrize("part", ["decode", pytest.param("prefill", marks=SLOW)])
def test_attention_is_raced(gpu_check: ModuleType, results, part: str):
    rows = rows_of(gpu_check, results, part)
    assert len(rows) == 2
    for row in rows:
        assert row["us"] > 0
        assert row["of_copy"] == pytest.approx(row["gb_per_s"] / 10, rel=1e-2)
        assert row["of_matmul"] == pytest.approx(row["tflop_per_s"] / 0.1, rel=1e-2)
    plain, other = (row["times_as_fast_as"] for row in rows)
    own = {"decode": ("jax paged_attention",), "prefill": ("torch flex_attention",)}[part]
    assert plain.keys() == {*RIVALS, *own}
    assert [ratio for ratio in plain.values() if not isinstance(ratio, float)] == []
    assert set(other) == {"jpaged, XLA"}


def test_pools_are_raced(gpu_check: ModuleType, results):
    write, copy = rows_of(gpu_check, results, "pool")
    assert write["case"] == "write 4 tokens, int8, scales"
    assert copy["case"] == "copy 2 blocks, int8, scales"
    assert write["times_as_fast_as"]["xla"] > 0
    assert copy["times_as_fast_as"]["xla"] > 0


def test_products_are_raced(gpu_check: ModuleType, results):
    plain, quantized = rows_of(gpu_check, results, "products")
    assert plain["case"] == "bfloat16 by XLA, 2 rows"
    assert quantized["times_as_fast_as"]["bfloat16 by XLA"] > 0


@SLOW
def test_the_engine_is_measured(gpu_check: ModuleType, results):
    (row,) = rows_of(gpu_check, results, "step")
    assert row["implementation"] == "pallas"
    assert row["tokens_per_s"] == pytest.approx(2e6 / row["us"], rel=1e-2)


@SLOW
def test_generate_is_beside_transformers(
    gpu_check: ModuleType, results, monkeypatch: pytest.MonkeyPatch
):
    engine_speed = importlib.import_module("gpu.engine_speed")
    monkeypatch.setattr(engine_speed, "_transformers", lambda case, budget: 4.0)
    (row,) = rows_of(gpu_check, results, "generate")
    assert row["times_as_fast_as"]["transformers"] == pytest.approx(
        row["tokens_per_s"] / 4, rel=1e-2
    )
    monkeypatch.setattr(engine_speed, "_transformers", lambda case, budget: "no torch")
    (row,) = rows_of(gpu_check, results, "generate")
    assert row["transformers"] == "no torch"
    assert "times_as_fast_as" not in row


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ModuleNotFoundError('no torch')", "ModuleNotFoundError: no torch"),
        ("import os; os._exit(9)", "ended with 9"),  # as one that is killed, without a word
    ],
)
def test_transformers_that_can_not_run_say_why(
    scripts, measuring: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code, told
):
    engine_speed = importlib.import_module("gpu.engine_speed")
    script = tmp_path / "hf_generate.py"
    script.write_text(code)
    monkeypatch.setattr(engine_speed, "HF_GENERATE", script)
    assert engine_speed._transformers(("tiny", 2, 16, 8), measuring.Budget(60)) == told


def test_kernels_are_judged(gpu_check: ModuleType, results):
    rows = rows_of(gpu_check, results, "correct")
    assert [row["case"].split(":")[0] for row in rows] == [
        *("decode", "prefill", "write", "write", "product", "product")
    ]
    assert all(row["is_right"] and row["of_bound"] <= 1 for row in rows)


@SLOW
def test_every_case_is_judged_right(measuring: ModuleType):
    """Those of a GPU, interpreted."""
    correctness = importlib.import_module("gpu.correctness")
    cases = {**correctness.ATTENTION, **correctness.POOL, **correctness.PRODUCTS}
    rows = [correctness.judged(name, judge, interpret=True) for name, judge in cases.items()]
    assert [row for row in rows if not row["is_right"]] == []


def test_what_is_wrong_is_told():
    correctness = importlib.import_module("gpu.correctness")

    def judge(interpret: bool, got=1.0, bound=0.5):
        return (np.array([got, 0.0]),), (np.array([1.25, 0.0]),), (np.array([bound, 0.0]),)

    def told(**changes) -> dict:
        return correctness.judged(
            "a", lambda interpret: judge(interpret, **changes), interpret=True
        )

    assert told() == {"case": "a", "is_right": True, "of_bound": 0.5}
    assert told(bound=0.125) == {"case": "a", "is_right": False, "of_bound": 2.0}
    assert not told(got=np.nan)["is_right"]
    assert not told(bound=0.0)["is_right"]
    assert "TypeError" in told(nothing=1)["error"]
    assert json.dumps(told(got=np.nan)) == json.dumps(
        {"case": "a", "is_right": False, "of_bound": None}
    )
    wrong_shape = lambda interpret: (np.zeros(2), np.zeros(3), np.zeros(3))  # noqa: E731
    assert not correctness.judged("a", wrong_shape, interpret=True)["is_right"]


def test_what_was_judged_is_not_judged_again(gpu_check: ModuleType, results):
    correctness = importlib.import_module("gpu.correctness")
    measuring = importlib.import_module("gpu.measuring")
    effort, budget = measuring.Effort.smoke(), measuring.Budget(600)
    names = list(correctness.SMOKE_ATTENTION)
    names += [name for part in (correctness.POOL, correctness.PRODUCTS) for name in list(part)[:2]]
    (row,) = correctness.correct(None, effort, budget, known=set(names[:2] + names[3:]))
    assert row["case"] == names[2]
    with pytest.raises(measuring.OutOfTimeError):
        list(correctness.correct(None, effort, measuring.Budget(-1), known=set()))


def test_the_device_is_measured(gpu_check: ModuleType, measuring: ModuleType, results):
    (told,) = rows_of(gpu_check, results, "device")
    assert told["kind"] == jax.devices()[0].device_kind
    assert told["copy_gb_per_s"] > 0
    assert told["versions"]["jax"] == jax.__version__
    device = measuring.device_of(told)
    assert device.bytes_per_second == told["copy_gb_per_s"] * 1e9
    sheet = {"data_sheet": measuring.peaks("NVIDIA H200")}
    assert measuring.device_of(sheet) == measuring.Device(4.8e12, 989e12)
    assert measuring.peaks("NVIDIA A100-SXM4-80GB")["gb_per_s"] == 2039
    assert measuring.peaks("cpu") is None


def test_what_can_not_be_measured_of_a_device_is_told(
    measuring: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    """The data sheet stands in; where there is none shares are 0, and times are told even so."""

    def fail(effort):
        raise RuntimeError("no memory")

    monkeypatch.setattr(measuring, "copy_bandwidth", fail)
    told = measuring.measure_device(measuring.Effort.smoke())
    assert told["error"] == "RuntimeError: no memory"
    assert told["bf16_tflop_per_s"] > 0
    figures = measuring.device_of(told).figures(1.0, num_bytes=1e9)
    assert (figures["us"], figures["gb_per_s"], figures["of_copy"]) == (1e6, 1.0, 0.0)
    sheet = told | {"data_sheet": measuring.peaks("NVIDIA H200")}
    assert measuring.device_of(sheet).bytes_per_second == 4.8e12


def test_calls_follow_each_other(measuring: ModuleType):
    effort = measuring.Effort(calls=3, rounds=2)
    carry = jnp.zeros(4)
    seconds = measuring.seconds_per_call(lambda x, y: x + y, carry, jnp.ones(4), effort=effort)
    assert seconds > 0
    assert not carry.any()  # and has not been donated


def test_parts_go_on_where_they_stopped(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """Parts as they end: well, out of time, and broken; then what a second call does."""
    path, begun, ends = tmp_path / "out" / "gpu.json", [], {"correct": "no time left"}

    def run_child(part: str, path: Path, seconds: float, *, is_smoke: bool):
        results = gpu_check.Results(path)
        begun.append((part, [row["case"] for row in results.rows(part)]))
        results.add(part, {"case": f"{part} {len(begun)}", "is_right": True})
        return ends.get(part), 1.0

    monkeypatch.setattr(gpu_check, "run_child", run_child)
    assert gpu_check.main(["--out", str(path)]) == 1
    assert [part for part, _ in begun] == list(gpu_check.SECONDS_OF)
    ends.clear()
    begun.clear()
    assert gpu_check.main(["--out", str(path)]) == 0
    assert begun == [("correct", ["correct 2"])]
    begun.clear()
    assert gpu_check.main(["--out", str(path), "--only", "decode"]) == 0
    assert begun == [("decode", [])]
    begun.clear()
    assert gpu_check.main(["--out", str(path), "--only", "pool", "--seconds", "5"]) == 0
    assert not begun
    assert "no time left for pool" in capsys.readouterr().out
    assert json.loads(path.read_text())["parts"]["decode"]["is_done"]


def test_a_wrong_kernel_or_a_broken_part_fails_the_check(gpu_check: ModuleType, results):
    assert gpu_check.is_good(results, ["device"])
    assert not gpu_check.is_good(results, ["device", "correct"])
    results.begin("correct", anew=True)
    results.add("correct", {"case": "a", "is_right": True})
    results.finish("correct", 1.0)
    assert gpu_check.is_good(results, ["correct"])
    results.add("correct", {"case": "b", "is_right": False})
    assert not gpu_check.is_good(results, ["correct"])
    results.begin("decode", anew=True)
    results.add("decode", {"case": "c", "error": "illegal address"})
    results.finish("decode", 1.0)
    assert not gpu_check.is_good(results, ["decode"])


def test_a_part_that_takes_too_long_is_ended_with_all_that_it_began(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A process of its own, as torch has them to compile, must not hold the next part up."""
    began = tmp_path / "began"
    script = tmp_path / "part.py"
    child = f"import time, os; open({str(began)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    script.write_text(
        f"import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"time.sleep(60)\n"
    )
    monkeypatch.setattr(gpu_check, "__file__", str(script))
    error, took = gpu_check.run_child("pool", tmp_path / "results.json", 5, is_smoke=True)
    assert error == "it took too long"
    assert took < 30
    status = Path(f"/proc/{began.read_text()}/status")
    for _ in range(100):  # a killed process may still be seen running for a moment
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        time.sleep(0.1)
    pytest.fail("the part's own process lives on")


def test_a_part_that_breaks_says_why(gpu_check: ModuleType, tmp_path: Path):
    """Without a measured device a part can not begin."""
    path = tmp_path / "results.json"
    gpu_check.Results(path).begin("pool", anew=True)
    error, took = gpu_check.run_child("pool", path, 120, is_smoke=True)
    assert error is not None
    assert error.startswith("ended with 1: ")
    assert "IndexError" in error
    assert took > 0
    lines = list(gpu_check.lines_of("pool", {"rows": [], "is_done": False, "error": error}))
    assert lines[0].startswith("pool: ? s, not done: ended with 1")


@SLOW
def test_the_whole_command(tmp_path: Path):
    path = tmp_path / "results.json"
    command = [
        sys.executable,
        str(ROOT / "scripts" / "gpu_check.py"),
        "--smoke",
        "--out",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(path.read_text())["parts"]
    assert all(part["is_done"] for part in parts.values())
    (row,) = parts["generate"]["rows"]
    assert row["times_as_fast_as"]["transformers"] > 0


@pytest.mark.parametrize(
    "kernel", [*(pytest.param(name, marks=SLOW) for name in ("decode", "prefill")), "products"]
)
def test_tilings_are_compared(kernel: str, capsys: pytest.CaptureFixture[str]):
    tune = importlib.import_module("tune_kernels")
    assert tune.main([kernel, "--smoke"]) == 0
    told, *lines = capsys.readouterr().out.splitlines()
    assert told.startswith("# cpu, jax ")
    cases = [line for line in lines if line.startswith("#")]
    assert all("us as chosen; 2 tilings measured" in line for line in cases)
    name = {"decode": "Decode", "prefill": "Prefill", "products": "Matmul"}[kernel]
    tilings = [line for line in lines if not line.startswith("#")]
    assert len(tilings) == 2 * len(cases)
    assert all(line.startswith(f"{name}Tiling(") and line.endswith(" x") for line in tilings)


def test_tilings_that_can_not_be_are_left_out():
    tune = importlib.import_module("tune_kernels")
    measuring = importlib.import_module("gpu.measuring")
    tilings = [
        tune.DecodeTiling(tile_kv=tile_kv, num_splits=1, num_warps=4, num_stages=2)
        for tile_kv in (16, 32, 64)
    ]

    def measure(tiling) -> float:
        if tiling is not None and tiling.tile_kv == 64:
            raise ValueError("too little shared memory")
        return 2e-6 if tiling is None else 1e-6 * (tiling.tile_kv // 16)

    head, *rest = tune.compare("a case", measure, tilings, measuring.Budget(60))
    assert head == (
        "# a case: 2.0 us as chosen; 2 tilings measured, 1 left out, the last with ValueError: too "
        "little shared memory"
    )
    assert rest[0].startswith("DecodeTiling(tile_kv=16, num_splits=1, num_warps=4, num_stages=2),")
    assert rest[0].endswith("1.0 us, 2.00 x")
    with pytest.raises(measuring.OutOfTimeError):
        list(tune.compare("a case", measure, tilings, measuring.Budget(-1)))
