"""Linears as quantizers' own tools stored them, beside the weights these tools make of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels import repack
from pallas_kernels.quant_weight import QuantWeight

DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F8_E4M3": np.uint8,  # its bits
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}
BLOCK = (128, 128)
SLICES = Path(__file__).parent.parent / "fixtures" / "formats" / "quantized_linears.npz"


def slices() -> dict[str, dict[str, np.ndarray]]:
    """By format: the stored arrays of the first 32 outputs of a linear, and `dequant` [32 D]."""
    found: dict[str, dict[str, np.ndarray]] = {}
    with np.load(SLICES) as arrays:
        for name in arrays.files:
            form, part = name.split(".")
            found.setdefault(form, {})[part] = arrays[name]
    return found


def linears(folder: Path) -> Iterator[tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Name, stored arrays and reference arrays of each linear of a checkpoint that has these."""
    stored = read_tensors(folder / "model.safetensors")
    reference = read_tensors(folder / "reference.safetensors")
    for key in reference:
        if not key.startswith("dequant."):
            continue
        name = key.removeprefix("dequant.").removesuffix(".weight")
        parts = {
            k.removeprefix(f"{name}."): v for k, v in stored.items() if k.startswith(f"{name}.")
        }
        about = {"dequant": reference[key]}
        for part in ("linear_in", "linear_out"):
            if f"{part}.{name}" in reference:
                about[part] = reference[f"{part}.{name}"]
        yield name, parts, about


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file, as views of one buffer."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(
            raw[start + info["data_offsets"][0] : start + info["data_offsets"][1]],
            DTYPES[info["dtype"]],
        ).reshape(info["shape"])
        for name, info in header.items()
    }


def repacked(form: str, parts: dict[str, np.ndarray]) -> QuantWeight:
    """The linear as kernels read it. form: the fixture's name, which begins with its tool's."""
    if "weight_packed" in parts:
        bits = 8 if "w8" in form else 4
        D = parts["weight_packed"].shape[1] * 32 // bits
        return repack.from_pack_quantized(
            parts["weight_packed"],
            parts["weight_scale"],
            parts.get("weight_zero_point"),
            parts.get("weight_g_idx"),
            num_inputs=D,
            bits=bits,
            group_size=D // parts["weight_scale"].shape[1],
        )
    if "qweight" in parts:
        return _from_qweight(form, parts)
    if parts["weight"].dtype == np.int8:
        return repack.from_int8(parts["weight"], parts["weight_scale"])
    scales = parts["weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"]
    is_blocks = "weight_scale_inv" in parts or "block" in form
    return repack.from_float8(
        parts["weight"], scales.astype(np.float32), block=BLOCK if is_blocks else None
    )


def _from_qweight(form: str, parts: dict[str, np.ndarray]) -> QuantWeight:
    arrays = parts["qweight"], parts["qzeros"], parts["scales"]
    if form.startswith("awq"):
        D = parts["qweight"].shape[0]
        return repack.from_awq(*arrays, group_size=D // parts["scales"].shape[0])
    D = parts["g_idx"].size
    return repack.from_gptq(
        *arrays,
        parts["g_idx"],
        bits=parts["qweight"].shape[0] * 32 // D,
        group_size=D // parts["scales"].shape[0],
    )
