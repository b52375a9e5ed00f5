"""From C++ source to a shared library in the user's cache, with the compiler the machine has.

A library is named by all it depends on (source, flags, compiler, jaxlib and processor) and by its
own bytes: one that was damaged since is made again, for loading it may end the process. Whatever is
missing raises NativeUnavailableError with the reason; who calls then does without.
"""

import functools as ft
import hashlib
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import jax

from jpaged.errors import NativeUnavailableError

COMPILERS = ("g++", "clang++", "c++")
# Not -ffast-math: NaN must stay NaN, and sums keep their order.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fPIC", "-shared", "-pthread"),
)
_TIMEOUT_SECS = 300


def build_all(
    sources: Sequence[Path], folder: Path, compilers: Sequence[str] = COMPILERS
) -> list[Path]:
    """The libraries of some sources in `folder`, those not there yet compiled at the same time.

    compilers: names or paths; the first that exists is taken.

    Several processes may build at once: each compiles a file of its own, and renames it. Raises
    NativeUnavailableError: no compiler, it fails, or the folder can not be written.
    """
    compiler = find_compiler(compilers)
    build = ft.partial(_build, folder=folder, compiler=compiler)
    try:
        with ThreadPoolExecutor(len(sources)) as pool:
            return list(pool.map(build, sources))
    except RuntimeError:  # none takes work once the main thread has ended
        return list(map(build, sources))


def _build(source: Path, folder: Path, compiler: str) -> Path:
    stem = f"{source.stem}-{library_key(source, compiler)}"
    try:
        for library in sorted(folder.glob(f"{stem}-*.so")):
            if library.name == _name(stem, library):
                return library
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            made = Path(own) / "made.so"
            _run([compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", str(source), "-o", str(made)])
            return made.replace(folder / _name(stem, made))
    except OSError as error:
        raise NativeUnavailableError(f"can not write {folder}: {error}") from error


def _name(stem: str, library: Path) -> str:
    """What a library is to be called, by its bytes as they are."""
    return f"{stem}-{hashlib.sha256(library.read_bytes()).hexdigest()[:16]}.so"


def find_compiler(compilers: Sequence[str] = COMPILERS) -> str:
    """The path of the first C++ compiler there is."""
    for name in compilers:
        if path := shutil.which(name):
            return path
    raise NativeUnavailableError(f"there is no C++ compiler (looked for {', '.join(compilers)})")


def library_key(source: Path, compiler: str) -> str:
    """What a library of `source` is known by: a digest of all its bits depend on."""
    headers = sorted(source.parent.glob("*.h"))
    parts = (
        *(path.read_text() for path in (source, *headers)),
        " ".join(FLAGS),
        _run([compiler, "--version"]),
        version("jaxlib"),
        _processor(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Machine, model and features, as far as the system tells them."""
    parts = [platform.machine(), platform.processor()]
    info = Path("/proc/cpuinfo")
    if info.is_file():
        first = info.read_text().split("\n\n")[0].splitlines()
        names = ("model name", "flags", "features", "cpu part")
        parts += [line for line in first if line.lower().startswith(names)]
    return "\n".join(parts)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        # The first complaint is the one that tells; templates make the rest long.
        told = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise NativeUnavailableError(f"{command[0]} fails: {told[0].strip()[:300]}")
    return done.stdout
