"""The native kernels as XLA's functions: compiled, loaded and made known, once a process."""

import ctypes
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jpaged.errors import NativeUnavailableError
from jpaged.native import build

SOURCES = ("attention", "block_copy", "kv_write", "matmul")  # each with a handler of its name

_targets: dict[str, str] = {}  # XLA's names of what was loaded
_lock = threading.Lock()  # of whoever loads; XLA takes a name but once


def load(folder: Path | None, compilers: Sequence[str] = build.COMPILERS) -> None:
    """Makes the kernels ready; the first that does serves the whole process.

    folder: where compiled libraries are kept; None keeps none, and compiles each time.

    Raises NativeUnavailableError with the reason: no compiler, or it fails; a folder that can not
    be written; a library that does not load.
    """
    with _lock:
        if _targets:
            return
        if folder is None:
            with tempfile.TemporaryDirectory() as own:
                _targets.update(_build_all(Path(own), compilers))
        else:
            _targets.update(_build_all(folder, compilers))


def target(name: str) -> str:
    """XLA's name of a kernel. Raises NativeUnavailableError if nothing is loaded."""
    if not _targets:
        raise NativeUnavailableError("the native kernels are not loaded; load them first")
    return _targets[name]


def _build_all(folder: Path, compilers: Sequence[str]) -> dict[str, str]:
    here = Path(__file__).parent
    libraries = build.build_all([here / f"{name}.cpp" for name in SOURCES], folder, compilers)
    # All before any is registered: who tries again must find none of them taken.
    handlers = [
        _handler(library, f"jpaged_{name}")
        for name, library in zip(SOURCES, libraries, strict=True)
    ]
    return {
        name: _register(library, handler)
        for name, library, handler in zip(SOURCES, libraries, handlers, strict=True)
    }


def _handler(library: Path, symbol: str) -> Any:
    try:
        return getattr(ctypes.CDLL(str(library)), symbol)
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"{library} does not load: {error}") from error


def _register(library: Path, handler: Any) -> str:
    # Programs that XLA keeps between runs name what they call: another library, another name.
    name = f"jpaged_{library.stem.replace('-', '_')}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    return name
