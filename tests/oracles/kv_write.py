"""What a step's keys and values become in the pools, token by token, in NumPy."""

import ml_dtypes
import numpy as np

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
LEAST_PEAK = np.float32(1e-30)


def turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """RoPE on [T heads C] by the angles of [T X]: dimension i goes with i + X."""
    out = x.astype(np.float32)
    X = cos.shape[1]
    for t in range(len(x)):
        a, b = out[t, :, :X].copy(), out[t, :, X : 2 * X].copy()
        out[t, :, :X] = a * cos[t] - b * sin[t]
        out[t, :, X : 2 * X] = b * cos[t] + a * sin[t]
    return out.astype(x.dtype)


def stored(x: np.ndarray, kv_dtype: str) -> np.ndarray:
    """Numbers as a pool has them: rounded to the nearest, and in 8 bits saturated."""
    if kv_dtype not in LARGEST:
        return x.astype(kv_dtype)
    x = x.astype(np.float32)
    if kv_dtype == "int8":
        return np.clip(np.rint(x), -128, 127).astype(np.int8)
    largest = LARGEST[kv_dtype]
    return np.clip(x, -largest, largest).astype(getattr(ml_dtypes, kv_dtype)).view(np.uint8)


def write(
    pool: np.ndarray,
    scale: np.ndarray | None,
    new: np.ndarray,
    slot_mapping: np.ndarray,
    kv_dtype: str,
) -> tuple[np.ndarray, np.ndarray | None]:
    """The pool [N S K C] with new [T K C] in it, and its scales: None, [] or [N S K]."""
    pool = pool.copy()
    scale = None if scale is None else scale.copy()
    S = pool.shape[1]
    for t, slot in enumerate(slot_mapping):
        if slot < S:  # padding
            continue
        x = new[t]
        if scale is not None and scale.ndim == 0:
            x = x.astype(np.float32) * (np.float32(1) / scale)
        elif scale is not None:
            x = x.astype(np.float32)
            peak = np.maximum(np.abs(x).max(axis=1), LEAST_PEAK)
            own = peak * np.float32(1 / LARGEST[kv_dtype])
            scale[slot // S, slot % S] = own
            x = x * (np.float32(1) / own)[:, None]
        pool[slot // S, slot % S] = stored(x, kv_dtype)
    return pool, scale
