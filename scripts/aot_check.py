"""Compiles the kernels of `pallas_kernels` to machine code for GPUs that are not there.

    python scripts/aot_check.py                      # in an environment that it makes, .venv-aot
    python scripts/aot_check.py --python VENV/bin/python --only "decode: window" --arch sm_80

Every program of `scripts/gpu/programs.py` is compiled for an A100 (sm_80) and an H200 (sm_90a), by
XLA's CUDA plugin and ptxas of PyPI's wheels (about a gigabyte, installed once). It is checked that

- products are tensor-core instructions, and reads ahead are asynchronous copies of 16 bytes,
- no register is spilled, and shared memory is within what a program may have,
- a cache that is written is written in place, and no program has room for a second one.

A table of all is written as JSON and Markdown, beside each other. Ends with 1 if something failed.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu.machine_code import KernelCode, judge
from gpu.programs import PROGRAMS, Program
from gpu.targets import TARGETS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line, compiles, judges and writes. Returns 1 if something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", help="of an environment with JAX's CUDA plugin and ptxas")
    parser.add_argument("--jax", default="0.10.2", help="the version to make an environment of")
    parser.add_argument("--only", default="", help="programs whose name has this in it")
    parser.add_argument("--arch", choices=sorted(TARGETS), action="append")
    parser.add_argument("--out", type=Path, help="the table's file, without .json and .md")
    args = parser.parse_args(arguments)
    python = args.python or str(make_environment(ROOT / ".venv-aot", args.jax))
    names = [name for name in PROGRAMS if args.only in name]
    rows = []
    for arch in args.arch or sorted(TARGETS):
        for report in compile_all(python, arch, names):
            rows += (found := judge_report(report))
            print(*map(text_of, found), sep="\n", flush=True)
    versions = versions_of(python)
    stem = args.out or RESULTS / f"aot_jax-{versions['jax']}"
    write(rows, versions, stem)
    failed = [row for row in rows if row["problems"]]
    print(f"{len(rows) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


# --- the environment ---


def make_environment(folder: Path, version: str) -> Path:
    """The Python of an environment that can compile for GPUs; made unless it has the version."""
    python = folder / "bin" / "python"
    if python.exists() and versions_of(str(python)).get("jax") == version:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    packages = [f"{name}=={version}" for name in ("jax", "jax-cuda12-plugin", "jax-cuda12-pjrt")]
    install = [str(python), "-m", "pip", "install", "-q", *packages, "nvidia-cuda-nvcc-cu12"]
    subprocess.run(install, check=True)
    return python


def versions_of(python: str) -> dict[str, str]:
    """The versions of what compiles, in the environment of a Python."""
    code = (
        "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in "
        "m.distributions() if d.name.startswith(('jax', 'nvidia-cuda-nvcc'))}))"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


# --- compiling ---


def compile_all(python: str, arch: str, names: Sequence[str]) -> Iterator[Row]:
    """Reports of programs as they come; of one that ended its process, what the process said."""
    left = list(names)
    while left:
        with tempfile.TemporaryDirectory() as dump:
            done, said = yield from _compile(python, arch, dump, left)
        if done < len(left):
            yield {"program": left[done], "arch": arch, "error": said}
        left = left[done + 1 :]


def _compile(
    python: str, arch: str, dump: str, names: Sequence[str]
) -> Generator[Row, None, tuple[int, str]]:
    """Reports of one process; then how many there were, and how it ended."""
    command = [python, "-m", "gpu.compile_programs", arch, dump, *names]
    paths = os.pathsep.join([str(ROOT / "scripts"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = 0
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
            done += 1
        code = process.wait()
        said.seek(0)
        return done, f"the compiler ended with {code}: {said.read()[-1000:].strip()}"


# --- judging ---


def judge_report(report: Row) -> list[Row]:
    """A row for each kernel of a program, or one where there is none."""
    program = PROGRAMS[report["program"]]
    head = {name: getattr(program, name) for name in ("name", "kernel", "shape", "dtype")}
    head["arch"] = report["arch"]
    if "error" in report:
        return [{**head, "problems": [report["error"]]}]
    memory = {name: report[name] for name in ("temp_bytes", "alias_bytes")}
    problems = judge_memory(program, **memory)
    # XLA's own kernels stand beside ours.
    all_kernels = [KernelCode(**kernel) for kernel in report["kernels"]]
    kernels = [kernel for kernel in all_kernels if kernel.name.startswith(program.kernel)]
    if not kernels:
        return [{**head, **memory, "problems": [*problems, "no kernel of ours in the program"]}]
    limit = TARGETS[report["arch"]].shared_per_block
    asked = {"multiplies": program.multiplies, "copies_ahead": program.copies_ahead}
    return [
        {
            **head,
            **vars(kernel),
            "entry": kernel.name,
            "name": program.name,
            **memory,
            "problems": [*problems, *judge(kernel, shared_limit=limit, **asked)],
        }
        for kernel in kernels
    ]


def judge_memory(program: Program, *, temp_bytes: int, alias_bytes: int) -> list[str]:
    """What is wrong with the memory that a program takes beside its arguments."""
    problems = []
    if program.cache_bytes and temp_bytes >= program.cache_bytes:
        problems.append(f"{temp_bytes} bytes of temporaries: a cache has {program.cache_bytes}")
    written = sum(leaf.size * leaf.dtype.itemsize for leaf in _donated(program))
    if alias_bytes < written:
        problems.append(f"{alias_bytes} bytes written in place, of {written}")
    return problems


def _donated(program: Program) -> list[Any]:
    import jax

    return jax.tree.leaves([program.args[i] for i in program.donated])


# --- the table ---

_COLUMNS = {
    "program": "name",
    "shape": "shape",
    "dtype": "dtype",
    "arch": "arch",
    "registers": "registers",
    "spills": "spill_bytes",
    "shared": "shared_bytes",
    "mma": "num_mma",
    "wgmma": "num_wgmma",
    "cp.async 16": "num_copies_16",
    "threads": "num_threads",
}


def text_of(row: Row) -> str:
    """A row for a terminal."""
    verdict = "FAIL " + "; ".join(row["problems"]) if row["problems"] else "ok"
    figures = [f"{title} {row.get(key, '-')}" for title, key in list(_COLUMNS.items())[4:]]
    return f"{row['arch']:7}{row['name']:45} {', '.join(figures)}: {verdict}"


def write(rows: Sequence[Row], versions: dict[str, str], stem: Path) -> None:
    """Writes STEM.json and STEM.md."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    told = {"date": datetime.date.today().isoformat(), "versions": versions, "rows": rows}
    Path(f"{stem}.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    lines = [
        f"Kernels compiled by jax {versions['jax']} for GPUs that were not there, {told['date']}.",
        "Registers of a thread, bytes spilled by it, bytes of shared memory of a program; how",
        "often an instruction stands in the code. Written by `scripts/aot_check.py`.",
        "",
        f"| {' | '.join(_COLUMNS)} | verdict |",
        "|---" * (len(_COLUMNS) + 1) + "|",
    ]
    for row in rows:
        cells = [str(row.get(key, "")) for key in _COLUMNS.values()]
        lines.append(f"| {' | '.join(cells)} | {'; '.join(row['problems']) or 'ok'} |")
    Path(f"{stem}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
