"""What a device can do, and how long calls on it take.

Owns the clock. A call's time is that of many in a row, each of which needs the one before it: their
launches overlap with the device's work, as they do in a step, and no compiler can leave one out.
"""

import dataclasses
import functools as ft
import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Step = Callable[..., Any]
"""(carry, *args) -> carry, of the same shapes: one call, that needs what the last one gave."""

# GB/s and bfloat16 TFLOP/s (dense) of NVIDIA's data sheets: beside what is measured, and in its
# place where a measurement fails. The first name found counts.
_PEAKS = (
    ("GH200", 4000, 989),
    ("H200", 4800, 989),
    ("H100 PCIe", 2000, 756),
    ("H100", 3350, 989),
    ("A100-SXM4-40GB", 1555, 312),
    ("A100", 2039, 312),
    ("L40S", 864, 362),
    ("L4", 300, 121),
    ("A10", 600, 125),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is done: `is_smoke` is to run every line on a CPU, in seconds, and measures nothing.

    calls: in a row. rounds: of calls, whose median counts.
    """

    is_smoke: bool = False
    calls: int = 20
    rounds: int = 5

    @classmethod
    def smoke(cls) -> "Effort":
        """The least that there is."""
        return cls(is_smoke=True, calls=2, rounds=1)

    @property
    def interpret(self) -> bool:
        """Whether kernels are interpreted."""
        return jax.default_backend() == "cpu"


class OutOfTimeError(Exception):
    """A part has no time left for what it has still to do."""


class Budget:
    """Seconds that a run may take, counted from its start."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left."""
        return self._end - time.monotonic()

    def check(self) -> None:
        """Raises OutOfTimeError if none are left."""
        if self.left < 0:
            raise OutOfTimeError


def seconds_per_call(step: Step, carry: Any, *args: Any, effort: Effort) -> float:
    """Median seconds of a call of `step`, on the device."""

    @ft.partial(jax.jit, donate_argnums=0)
    def run(carry: Any, args: Any) -> Any:
        return lax.fori_loop(0, effort.calls, lambda _, carry: step(carry, *args), carry)

    carry = jax.tree.map(jnp.copy, carry)  # the caller's stays
    carry = jax.block_until_ready(run(carry, args))  # compiles
    seconds = []
    for _ in range(effort.rounds):
        start = time.perf_counter()
        carry = jax.block_until_ready(run(carry, args))
        seconds.append((time.perf_counter() - start) / effort.calls)
    return statistics.median(seconds)


def copy_bandwidth(effort: Effort) -> float:
    """Bytes per second that a large array is read and written with, counting both."""
    num_bytes = 2**16 if effort.is_smoke else 2**31
    x = jnp.zeros(num_bytes // 4, jnp.int32)
    return 2 * num_bytes / seconds_per_call(lambda x: x + 1, x, effort=effort)


def matmul_rate(effort: Effort) -> float:
    """bfloat16 operations per second of square products, by the library that XLA calls."""
    D = 64 if effort.is_smoke else 8192
    x, w = jax.random.normal(jax.random.key(0), (2, D, D), jnp.bfloat16)

    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        product = jnp.dot(x, w, preferred_element_type=jnp.float32)
        return (product * D**-0.5).astype(x.dtype)

    return 2 * D**3 / seconds_per_call(multiply, x, w, effort=effort)


def peaks(device_kind: str) -> dict[str, float] | None:
    """What the data sheet says of a device; None of one that is not known here."""
    for name, gb, tflop in _PEAKS:
        if name in device_kind:
            return {"gb_per_s": gb, "bf16_tflop_per_s": tflop}
    return None


@dataclasses.dataclass(frozen=True)
class Device:
    """What figures are held against: as measured."""

    bytes_per_second: float
    flops_per_second: float

    def figures(self, seconds: float, *, num_bytes: float = 0, num_flops: float = 0) -> dict:
        """A call's time, speeds, and the time as a share of what the device needs at the least."""
        least = max(num_bytes / self.bytes_per_second, num_flops / self.flops_per_second)
        figures = {"us": rounded(seconds * 1e6), "of_roofline": rounded(least / seconds)}
        if num_bytes:
            figures["gb_per_s"] = rounded(num_bytes / seconds / 1e9)
            figures["of_copy"] = rounded(num_bytes / seconds / self.bytes_per_second)
        if num_flops:
            figures["tflop_per_s"] = rounded(num_flops / seconds / 1e12)
            figures["of_matmul"] = rounded(num_flops / seconds / self.flops_per_second)
        return figures


def measure_device(effort: Effort) -> dict[str, Any]:
    """The device, what it reaches, and the versions of what runs on it."""
    kind = jax.devices()[0].device_kind
    told: dict[str, Any] = {"kind": kind, "data_sheet": peaks(kind), "versions": versions()}
    measures = {
        "copy_gb_per_s": lambda: copy_bandwidth(effort) / 1e9,
        "bf16_tflop_per_s": lambda: matmul_rate(effort) / 1e12,
    }
    for name, measure in measures.items():
        try:
            told[name] = rounded(measure())
        except Exception as error:  # the other parts can do without
            told["error"] = reason(error)
    return told


def device_of(told: dict[str, Any]) -> Device:
    """What `measure_device` told; its data sheet in the place of a figure that is missing, and of
    that one infinity: times are told, and shares are 0."""
    sheet = told["data_sheet"] or {"gb_per_s": math.inf, "bf16_tflop_per_s": math.inf}
    gb = told.get("copy_gb_per_s") or sheet["gb_per_s"]
    tflop = told.get("bf16_tflop_per_s") or sheet["bf16_tflop_per_s"]
    return Device(gb * 1e9, tflop * 1e12)


def versions() -> dict[str, str]:
    """Of JAX and its plugins, and of the libraries that it is compared with."""
    names = ("jax", "nvidia-cudnn", "torch", "transformers", "triton")
    return {
        name: one.version
        for one in importlib.metadata.distributions()
        if (name := one.name) and name.startswith(names)
    }


def rounded(x: float) -> float:
    """To four digits, for people and JSON."""
    return float(f"{x:.4g}")


def reason(error: Exception) -> str:
    """Why something could not be measured, in a line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
