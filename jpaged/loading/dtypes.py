"""Which dtype the weights are loaded in, from what was asked, what is stored, and the machine."""

import logging
import platform
from pathlib import Path

import jax

from jpaged.errors import ConfigError

_LOG = logging.getLogger(__name__)
_NAMES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float": "float32",
    "half": "float16",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}


def name_dtype(requested: str, checkpoint_dtype: str) -> str:
    """The dtype that was asked for, or the checkpoint's: float32, bfloat16 or float16.

    Raises:
        ConfigError: the name is unknown.
    """
    if requested != "auto":
        if requested not in _NAMES:
            raise ConfigError(f"dtype={requested!r} is not one of auto, {', '.join(_NAMES)}")
        return _NAMES[requested]
    dtype = _NAMES.get(checkpoint_dtype.removeprefix("torch."))
    if dtype is None:
        raise ConfigError(
            f"the checkpoint's dtype {checkpoint_dtype!r} is not supported; name one of "
            f"{', '.join(_NAMES)} as dtype"
        )
    return dtype


def resolve_dtype(requested: str, checkpoint_dtype: str, is_gguf: bool) -> str:
    """The dtype to load weights in: float32, bfloat16 or float16.

    `auto` takes the checkpoint's, and bfloat16 for a GGUF file, whose own types are packed ones. On
    a CPU without bfloat16 units it takes float32 in place of bfloat16, which would be slower there.
    What is asked by name is given.

    Raises:
        ConfigError: the name is unknown.
    """
    dtype = name_dtype(requested, "bfloat16" if is_gguf else checkpoint_dtype)
    is_auto = requested == "auto"
    if is_auto and dtype == "bfloat16" and jax.default_backend() == "cpu" and not cpu_has_bf16():
        _LOG.info("dtype auto: float32, since this CPU has no bfloat16 units")
        return "float32"
    return dtype


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 itself; False where the system does not tell."""
    wanted = {"bf16"} if platform.machine() in ("aarch64", "arm64") else {"avx512_bf16", "amx_bf16"}
    try:
        words = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False
    return not wanted.isdisjoint(words)
