"""Weights in groups of 32 inputs, one group at a time: what int8 and int4 numbers stand for."""

import numpy as np

GROUP = 32


def int8_values(group: np.ndarray) -> np.ndarray:
    """The nearest multiples of (largest size / 127), of at most 127 steps."""
    scale = np.float32(np.float16(np.abs(group).max() / np.float32(127)))
    if scale == 0:
        return np.zeros_like(group)
    return np.clip(np.round(group / scale), -127, 127) * scale


def int4_values(group: np.ndarray) -> np.ndarray:
    """The nearest of 16 values, evenly from the least to the largest."""
    least = np.float32(np.float16(group.min()))
    scale = np.float32(np.float16((group.max() - least) / np.float32(15)))
    if scale == 0:
        return np.full_like(group, least)
    return np.clip(np.round((group - least) / scale), 0, 15) * scale + least


def quantized_values(weight: np.ndarray, bits: str) -> np.ndarray:
    """What a quantized float32 weight [D F] stands for; zeros fill its last groups."""
    D, F = weight.shape
    values = np.zeros((-(-D // GROUP) * GROUP, F), np.float32)
    values[:D] = weight
    choose = int8_values if bits == "int8" else int4_values
    for start in range(0, len(values), GROUP):
        for column in range(F):
            group = values[start : start + GROUP, column].copy()
            values[start : start + GROUP, column] = choose(group)
    return values[:D]


def stored_values(numbers: np.ndarray, scales: np.ndarray, leasts: np.ndarray | None) -> np.ndarray:
    """What a stored weight [F D] stands for, from its bytes. leasts: two numbers in a byte, the
    group's first 16 in the low halves."""
    F = len(numbers)
    rows = []
    for f in range(F):
        row = []
        for g in range(scales.shape[1]):
            if leasts is None:
                row += [int(n) * float(scales[f, g]) for n in numbers[f, g * 32 : g * 32 + 32]]
                continue
            both = [int(n) for n in numbers[f, g * 16 : g * 16 + 16]]
            unpacked = [n % 16 for n in both] + [n // 16 for n in both]
            row += [n * float(scales[f, g]) + float(leasts[f, g]) for n in unpacked]
        rows.append(row)
    return np.array(rows, np.float32)
