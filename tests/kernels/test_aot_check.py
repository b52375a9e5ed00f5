"""Compiled kernels judged: what is read of a compiler's files, and what is said of it."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

PTX = """
.version 8.7
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry merge(
	.param .u64 .ptr .global .align 1 merge_param_0
)
{
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1};
}
.visible .entry paged_decode(
	.param .u64 .ptr .global .align 1 paged_decode_param_0
)
{
	cp.async.cg.shared.global [ %r39 + 0 ], [ %rd32 + 0 ], 0x10, %r40;
	@%p1 cp.async.ca.shared.global [ %r41 + 0 ], [ %rd33 + 0 ], 0x4, %r40;
	cp.async.cg.shared.global [%r42], [%rd34], 16;
	cp.async.commit_group ;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r2};
	wgmma.wait_group.sync.aligned 0;
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1};
}
"""
PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'merge' for 'sm_90a'
ptxas info    : Function properties for merge
    8 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Compiling entry function 'paged_decode' for 'sm_90a'
ptxas info    : Function properties for paged_decode
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, 1024 bytes smem
"""
THUNKS = (
    "001: kCustomKernel [source] paged_decode grid: [64, 8, 2] threads: [128, 1, 1]"
    "  shared_memory: 72192 bytes\n"
    "002: kKernel [sink] fusion.1 grid: [64, 1, 1] threads: [256, 1, 1]\n"
)


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")


@pytest.fixture
def aot_check() -> ModuleType:
    return importlib.import_module("aot_check")


@pytest.fixture
def machine_code() -> ModuleType:
    return importlib.import_module("gpu.machine_code")


def code_of(machine_code: ModuleType, **changes):
    code = machine_code.KernelCode(
        name="paged_decode",
        grid=[64, 8, 2],
        num_threads=128,
        registers=96,
        spill_bytes=0,
        shared_bytes=72192,
        num_mma=32,
        num_wgmma=0,
        num_copies_16=48,
        num_copies_less=0,
    )
    return dataclasses.replace(code, **changes)


def report_of(machine_code: ModuleType, program, **changes) -> dict:
    kernel = dataclasses.asdict(code_of(machine_code, name=program.kernel))
    report = {"program": program.name, "arch": "sm_80", "kernels": [kernel]}
    return {**report, "temp_bytes": 0, "alias_bytes": 0, **changes}


def test_a_kernels_files_are_read(machine_code: ModuleType):
    assert machine_code.read_launches(THUNKS) == {
        "paged_decode": {"grid": [64, 8, 2], "num_threads": 128, "shared_bytes": 72192}
    }
    entry = machine_code.cut_entry(PTX, "paged_decode")
    assert machine_code.count_instructions(entry) == {
        "num_mma": 1,
        "num_wgmma": 1,
        "num_copies_16": 2,
        "num_copies_less": 1,
    }
    assert machine_code.count_instructions(machine_code.cut_entry(PTX, "merge"))["num_mma"] == 1
    assert machine_code.cut_entry(PTX, "decode") is None
    told = {"registers": 96, "spill_bytes": 0, "static_shared_bytes": 1024}
    assert machine_code.read_ptxas(PTXAS, "paged_decode") == told
    assert machine_code.read_ptxas(PTXAS, "merge")["spill_bytes"] == 20
    with pytest.raises(ValueError, match="nothing of kernel 'decode'"):
        machine_code.read_ptxas(PTXAS, "decode")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"num_mma": 0, "num_wgmma": 8}, None),
        ({"spill_bytes": 8}, "8 bytes spilled"),
        ({"shared_bytes": 166913}, "166913 bytes of shared memory, of 166912"),
        ({"num_mma": 0}, "no tensor-core instruction"),
        ({"num_copies_16": 0, "num_copies_less": 3}, "no 16-byte asynchronous copy (3 smaller)"),
    ],
)
def test_code_is_judged(machine_code: ModuleType, changes: dict, problem: str | None):
    asked = {"shared_limit": 163 * 1024, "multiplies": True, "copies_ahead": True}
    found = machine_code.judge(code_of(machine_code, **changes), **asked)
    assert found == ([] if problem is None else [problem])


def test_what_is_not_asked_is_not_missed(machine_code: ModuleType):
    code = code_of(machine_code, num_mma=0, num_copies_16=0)
    assert not machine_code.judge(code, shared_limit=10**6, multiplies=False, copies_ahead=False)


def test_a_second_cache_is_found(aot_check: ModuleType, machine_code: ModuleType):
    program = aot_check.PROGRAMS["write: bfloat16"]
    pools = 2 * program.cache_bytes
    (row,) = aot_check.judge_report(report_of(machine_code, program, alias_bytes=pools))
    assert row["problems"] == []
    assert row["name"] == "write: bfloat16"
    assert row["entry"] == "kv_write"
    (row,) = aot_check.judge_report(
        report_of(machine_code, program, alias_bytes=pools // 2, temp_bytes=pools // 2)
    )
    assert row["problems"] == [
        f"{pools // 2} bytes of temporaries: a cache has {pools // 2}",
        f"{pools // 2} bytes written in place, of {pools}",
    ]


def test_kernels_of_xla_are_left_to_it_and_ours_are_missed(
    aot_check: ModuleType, machine_code: ModuleType
):
    program = aot_check.PROGRAMS["decode: bfloat16"]
    report = report_of(machine_code, program)
    report["kernels"].append(dataclasses.asdict(code_of(machine_code, name="fusion", num_mma=0)))
    assert [row["entry"] for row in aot_check.judge_report(report)] == ["paged_decode"]
    report["kernels"] = report["kernels"][1:]
    (row,) = aot_check.judge_report(report)
    assert row["problems"] == ["no kernel of ours in the program"]


def test_a_program_that_ends_its_compiler_does_not_end_the_others(
    aot_check: ModuleType, tmp_path: Path
):
    """The stand-in for a Python with the plugin aborts at a program called `bad`."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "for name in sys.argv[5:]:\n"
        "    if name == 'bad':\n"
        "        print('LLVM ERROR: cannot select', file=sys.stderr, flush=True)\n"
        "        os.abort()\n"
        "    print(json.dumps({'program': name, 'arch': sys.argv[3]}), flush=True)\n"
    )
    stand_in.chmod(0o755)
    reports = list(aot_check.compile_all(str(stand_in), "sm_80", ["a", "bad", "b", "bad"]))
    assert [report["program"] for report in reports] == ["a", "bad", "b", "bad"]
    assert ["error" in report for report in reports] == [False, True, False, True]
    assert "ended with -6: LLVM ERROR" in reports[1]["error"]


def test_the_table_is_written(aot_check: ModuleType, machine_code: ModuleType, tmp_path: Path):
    programs = [aot_check.PROGRAMS[name] for name in ("decode: bfloat16", "decode: float16")]
    reports = [report_of(machine_code, programs[0]), {"program": programs[1].name, "arch": "sm_80"}]
    reports[1]["error"] = "ended with -6"
    rows = [row for report in reports for row in aot_check.judge_report(report)]
    aot_check.write(rows, {"jax": "0.10.2"}, tmp_path / "deep" / "aot_jax-0.10.2")
    told = json.loads((tmp_path / "deep" / "aot_jax-0.10.2.json").read_text())
    assert [row["problems"] for row in told["rows"]] == [[], ["ended with -6"]]
    lines = (tmp_path / "deep" / "aot_jax-0.10.2.md").read_text().splitlines()
    assert lines[-2].startswith("| decode: bfloat16 | 64 queries")
    assert lines[-2].endswith("| 96 | 0 | 72192 | 32 | 0 | 48 | 128 | ok |")
    assert lines[-1].endswith("| ended with -6 |")
    assert "FAIL ended with -6" in aot_check.text_of(rows[1])


def test_the_compilers_report_says_what_jax_refuses(monkeypatch: pytest.MonkeyPatch):
    worker = importlib.import_module("gpu.compile_programs")
    targets = importlib.import_module("gpu.targets")
    programs = importlib.import_module("gpu.programs")

    def refuse(program, target, module):
        raise NotImplementedError("no such dtype")

    monkeypatch.setattr(worker, "compile_for", refuse)
    program = programs.PROGRAMS["decode: bfloat16"]
    told = worker.report(program, targets.TARGETS["sm_90a"], Path("nowhere"), "program_0")
    assert told["error"] == "NotImplementedError: no such dtype"
    assert told["arch"] == "sm_90a"


def test_pools_are_as_large_as_asked():
    programs = importlib.import_module("gpu.programs")
    large = programs.PROGRAMS["decode: pool of 5 GiB"]
    assert large.cache_bytes >= 5 * 2**30
    k = large.args[1]
    assert isinstance(k, jax.ShapeDtypeStruct)
    assert k.dtype == jnp.bfloat16
