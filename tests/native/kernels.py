"""The native kernels, for any test that wants them."""

from pathlib import Path

import pytest

from jpaged.errors import NativeUnavailableError
from jpaged.native import build, library

# Compiler flags of the forms of a kernel that this processor can run. Where it has tiles, what
# processors without them would use is a form of its own.
FORMS = {
    "as the processor can": (),
    **({"without tiles": ("-DJPAGED_NO_TILES",)} if "amx_tile" in build._processor() else {}),
    "vectors": ("-DJPAGED_NO_TILES", "-DJPAGED_NO_PAIRS"),
}
FOLDER = Path(__file__).resolve().parent.parent.parent / ".cache" / "jax" / "native"


def load_or_skip() -> None:
    """Loads them, where there is a compiler; all other trouble is a failure."""
    try:
        build.find_compiler()
    except NativeUnavailableError as reason:
        pytest.skip(str(reason))
    library.load(FOLDER)
