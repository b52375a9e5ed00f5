"""Paged attention in C++: the same contract as `jpaged.ops.paged_attention`, which calls it.

`attention.cpp` is compiled, loaded and made known to XLA by `load`, once a process. Its results do
not depend on a query's company, so that deterministic mode needs no form of its own.
"""

import ctypes
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.errors import NativeUnavailableError
from jpaged.native import build
from jpaged.typing import Array, Float, Int, Shaped

SOURCE = Path(__file__).with_name("attention.cpp")
_SYMBOL = "jpaged_attention"
_DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}  # as in the source

_target: str | None = None  # XLA's name of what was loaded


def load(folder: Path | None, compilers: Sequence[str] = build.COMPILERS) -> None:
    """Compiles, if need be, and loads the kernels; the first that loads serves the whole process.

    folder: where compiled libraries are kept; None keeps none, and compiles each time.

    Raises NativeUnavailableError with the reason: no compiler, or it fails; a folder that can not
    be written; a library that does not load.
    """
    global _target
    if _target is not None:
        return
    if folder is None:
        with tempfile.TemporaryDirectory() as own:
            _target = _register(build.build(SOURCE, Path(own), compilers))
    else:
        _target = _register(build.build(SOURCE, folder, compilers))


def _register(library: Path) -> str:
    try:
        symbol = getattr(ctypes.CDLL(str(library)), _SYMBOL)
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"{library} does not load: {error}") from error
    # Programs that XLA keeps between runs name what they call: another library, another name.
    target = library.stem.replace("-", "_")
    jax.ffi.register_ffi_target(f"jpaged_{target}", jax.ffi.pycapsule(symbol), platform="cpu")
    return f"jpaged_{target}"


def attend(
    q: Float[Array, "T H C"],
    k: Shaped[Array, "N S K C"],
    v: Shaped[Array, "N S K C"],
    *,
    kv_dtype: str,
    block_table: Int[Array, "B M"],
    context_lens: Int[Array, " B"],
    query_start_loc: Int[Array, " B+1"],
    num_decode_rows: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H C"]:
    """`paged_attention` over pools whose bits are of the dtype `kv_dtype`.

    Has no derivative. Under `vmap` the calls come one after the other.

    Raises NativeUnavailableError if nothing is loaded.
    """
    if _target is None:
        raise NativeUnavailableError("the native kernels are not loaded; load them first")
    call = jax.ffi.ffi_call(
        _target, jax.ShapeDtypeStruct(q.shape, q.dtype), vmap_method="sequential"
    )
    no_sinks = jnp.zeros(0, jnp.float32)
    return call(
        *(q, k, v, block_table, context_lens, query_start_loc),
        no_sinks if sinks is None else sinks.astype(jnp.float32),
        num_decode_rows=np.int64(num_decode_rows),
        q_dtype=np.int64(_DTYPES[q.dtype.name]),
        kv_dtype=np.int64(_DTYPES[kv_dtype]),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0),
        window=np.int64(window or 0),
    )
