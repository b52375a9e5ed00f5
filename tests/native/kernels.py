"""The native kernels, for any test that wants them."""

from pathlib import Path

import pytest

from jpaged.errors import NativeUnavailableError
from jpaged.native import build, library

FOLDER = Path(__file__).resolve().parent.parent.parent / ".cache" / "jax" / "native"


def load_or_skip() -> None:
    """Loads them, where there is a compiler; all other trouble is a failure."""
    try:
        build.find_compiler()
    except NativeUnavailableError as reason:
        pytest.skip(str(reason))
    library.load(FOLDER)
