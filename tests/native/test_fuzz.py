"""The kernel under sanitizers: no read out of range, no race, the same bits on any threads."""

import os
import subprocess
from pathlib import Path

import jax
import pytest

from jpaged.errors import NativeUnavailableError
from jpaged.native import build

HERE = Path(__file__).parent
FOLDER = Path(build.__file__).parent
SANITIZERS = {
    "memory": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "threads": ["-fsanitize=thread"],
}


def compile_harness(source: Path, made: Path, flags: list[str]) -> None:
    try:
        compiler = build.find_compiler()
    except NativeUnavailableError as reason:
        pytest.skip(str(reason))
    own = [flag for flag in build.FLAGS if flag not in ("-shared", "-O3")]
    folders = [f"-I{jax.ffi.include_dir()}", f"-I{FOLDER}"]
    command = [compiler, *own, "-O1", "-g", *flags, *folders, str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def run_harness(made: Path, num_calls: int, seed: int) -> subprocess.CompletedProcess:
    command = [str(made), str(num_calls), str(seed)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SANITIZERS)
def test_random_calls(kind: str, tmp_path: Path):
    compile_harness(HERE / "fuzz.cpp", tmp_path / "fuzz", SANITIZERS[kind])
    for seed in range(3):
        done = run_harness(tmp_path / "fuzz", 40, seed)
        assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        # One position too many: a table entry that nobody may follow.
        ("std::min(start + TILE, hi)", "std::min(start + TILE, hi + 1)"),
        # A row read in whole vectors, past its end and at last past the pool's.
        ("c < C ? widen(from[c]) : 0.0f", "widen(from[c])"),
    ],
)
def test_the_harness_sees_wrong_reads(was: str, becomes: str, tmp_path: Path):
    """The control: the same calls with a bug in the kernel."""
    kernel = (FOLDER / "attention.cpp").read_text()
    assert kernel.count(was) == 1
    (tmp_path / "attention.cpp").write_text(kernel.replace(was, becomes))
    (tmp_path / "fuzz.cpp").write_text((HERE / "fuzz.cpp").read_text())
    compile_harness(tmp_path / "fuzz.cpp", tmp_path / "fuzz", SANITIZERS["memory"])
    assert run_harness(tmp_path / "fuzz", 40, 0).returncode != 0
