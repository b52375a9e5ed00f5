"""The kernels under sanitizers: no read out of range, no race, the same bits on any threads."""

import os
import subprocess
from pathlib import Path

import jax
import pytest

from jpaged.errors import NativeUnavailableError
from jpaged.native import build
from tests.native.kernels import FORMS

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
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", ["attention", "block_copy", "kv_write", "matmul"])
@pytest.mark.parametrize("kind", SANITIZERS)
def test_random_calls(kind: str, kernel: str, form: str, tmp_path: Path):
    flags = [*SANITIZERS[kind], *FORMS[form]]
    compile_harness(HERE / f"fuzz_{kernel}.cpp", tmp_path / "fuzz", flags)
    for seed in range(3):
        done = run_harness(tmp_path / "fuzz", 40, seed)
        assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "was", "becomes"),
    [
        # One position too many: a table entry that nobody may follow.
        ("attention", "end = std::min(start + TILE, hi)", "end = std::min(start + TILE, hi + 1)"),
        # A row read in whole vectors, past its end and at last past the pool's.
        ("attention", "c < C ? widen(from[c]) : 0.0f", "widen(from[c])"),
        # A key read in whole chunks of columns.
        ("attention", "c + WIDTH <= C; c += WIDTH", "c < C; c += WIDTH"),
        # A row of x read in whole vectors.
        ("matmul", "if (num >= LANES) return read(from);", "return read(from);"),
        # A head written in whole vectors, past the last one's end.
        ("kv_write", "c + LANES <= C; c += LANES) write", "c < C; c += LANES) write"),
        # A block read only once its place was written over.
        ("block_copy", "std::memcpy(held.data() + i", "if (i == 0) std::memcpy(held.data() + i"),
        # A panel's row written as a whole, past the last row's end.
        ("matmul", "if (width < PANEL)", "if (width < 0)"),
    ],
)
def test_the_harness_sees_what_is_wrong(kernel: str, was: str, becomes: str, tmp_path: Path):
    """The control: the same calls with a bug in the kernel, as vectors: tile registers would hide
    it from the sanitizer."""
    num_found = 0
    for source in (*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp")):
        text = source.read_text()
        num_found += text.count(was)
        (tmp_path / source.name).write_text(text.replace(was, becomes))
    assert num_found == 1
    for name in ("fuzz.h", f"fuzz_{kernel}.cpp"):
        (tmp_path / name).write_text((HERE / name).read_text())
    flags = [*SANITIZERS["memory"], *FORMS["vectors"]]
    compile_harness(tmp_path / f"fuzz_{kernel}.cpp", tmp_path / "fuzz", flags)
    assert run_harness(tmp_path / "fuzz", 40, 0).returncode != 0
