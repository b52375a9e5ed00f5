"""Products with quantized weights to be judged: each kind of weight, few rows and many."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.quant_weight import INT4_MIDDLE, QuantWeight, pack_int4, pad_inputs
from tests.oracles.quantized import dequantize

D, F = 640, 384
_ROUNDING = 2.0**-16  # of a sum in float32, relative to the sum of magnitudes


def judge(
    kind: str,
    num_rows: int,
    dtype: str,
    group: int,
    columns: int,
    offset: str | None,
    is_ordered: bool,
    interpret: bool,
) -> tuple[Any, Any, Any]:
    """Rows times a weight, as float32."""
    rng = np.random.default_rng(0)
    rows = -(-D // group)
    if kind == "int4":
        numbers = values = rng.integers(0, 16, (F, D)).astype(np.uint8)
        stored = pack_int4(jnp.asarray(numbers))
    elif kind == "int8":
        values = rng.integers(-128, 128, (F, D)).astype(np.int8)
        stored = pad_inputs(jnp.asarray(values))
    else:
        values = rng.normal(size=(F, D)).astype(getattr(ml_dtypes, kind))
        stored = pad_inputs(jnp.asarray(values.view(np.uint8)))
    scales = rng.uniform(0.1, 1, (rows, -(-F // columns))).astype(np.float32)
    offsets: dict[str, Any] = {}
    if offset == "zeros":
        offsets["zeros"] = rng.integers(0, 16, (rows, F)).astype(values.dtype)
    if offset == "leasts":
        offsets["leasts"] = rng.normal(size=(rows, F)).astype(np.float32)
    spans: dict[str, Any] = {"inputs_per_scale": group, "outputs_per_scale": columns}
    spans["order"] = None if is_ordered else rng.permutation(D).astype(np.int32)
    implied = {"zeros": np.full((rows, F), INT4_MIDDLE)} if kind == "int4" and not offset else {}
    weight = dequantize(values, scales, **spans, **implied, **offsets)
    held = QuantWeight(numbers=stored, scales=scales, kind=kind, num_inputs=D, **spans, **offsets)
    x = rng.normal(size=(num_rows, D)).astype(dtype)
    multiply = jax.jit(ft.partial(quant_matmul, dtype="float32", interpret=interpret))
    got = multiply(jnp.asarray(x), jax.tree.map(jnp.asarray, held))
    wide = x.astype(np.float64)
    size = np.abs(wide) @ np.abs(weight)
    if offset is not None:  # added to sums of what they are taken from
        size += np.abs(wide) @ np.full_like(weight, 16.0)
    return got, wide @ weight, _ROUNDING * size


_KINDS: dict[str, tuple[str, int, int, str | None, bool]] = {
    "AWQ's int4": ("int4", 128, 1, "zeros", True),
    "int4": ("int4", 32, 1, None, True),
    "GPTQ's int4 in order": ("int4", 128, 1, "zeros", False),
    "GGUF's int4": ("int4", 32, 1, "leasts", True),
    "int8": ("int8", D, 1, None, True),
    "int8 in groups": ("int8", 32, 1, None, True),
    "e4m3": ("float8_e4m3fn", D, 1, None, True),
    "e4m3 in blocks": ("float8_e4m3fn", 128, 128, None, True),
    "e5m2": ("float8_e5m2", D, 1, None, True),
}
PRODUCTS: dict[str, Any] = {
    f"product: {what}, {dtype}, {M} rows": ft.partial(judge, kind, M, dtype, *rest)
    for what, (kind, *rest) in _KINDS.items()
    for dtype, M in (("bfloat16", 1), ("bfloat16", 130), ("float16", 17))
}
