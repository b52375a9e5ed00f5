"""Truncated sampling with sorts: slow, in plain NumPy.

Works on the relative probabilities of one row (the likeliest id has 1), float32. Shares of the
total are integers of about 30 bits, as exact sums need them.
"""

import numpy as np


def shares(probs: np.ndarray) -> np.ndarray:
    """Each id's share of a total between 2**29 and 2**30."""
    _, exponent = np.frexp(np.float32(probs.sum(dtype=np.float64)))
    return np.floor(np.ldexp(probs.astype(np.float64), 30 - exponent) + 0.5).astype(np.int64)


def kept_ids(probs: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The ids that truncation leaves and that have a share: these alone can ever be drawn."""
    weights = shares(probs)
    return {i for i in truncate(probs, top_k=top_k, top_p=top_p, min_p=min_p) if weights[i] > 0}


def truncate(probs: np.ndarray, *, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The ids that min-p, then top-k, then top-p of the rest leave; ties at a limit all stay."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    kept = [i for i in order if probs[i] >= np.float32(min_p)]
    if 0 < top_k < len(kept):
        kept = [i for i in kept if probs[i] >= probs[kept[top_k - 1]]]
    if top_p < 1:
        weights = shares(probs)
        left = int(sum(weights[kept]))
        target = max(1, int(np.ceil(np.float32(top_p) * np.float32(left))))
        mass = np.cumsum(weights[kept])
        last = kept[int(np.searchsorted(mass, min(target, left)))]
        kept = [i for i in kept if probs[i] >= probs[last]]
    return set(kept)


def draw(probs: np.ndarray, kept: set[int], bits: int) -> int:
    """The id at which the cumulative share passes the fraction bits / 2**32 of what is kept."""
    weights = shares(probs)
    weights[[i for i in range(len(probs)) if i not in kept]] = 0
    point = bits * int(weights.sum()) >> 32
    return int(np.searchsorted(np.cumsum(weights), point, side="right"))


def probabilities(
    logits: np.ndarray,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """The distribution that a row is drawn from, float64."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max()).astype(np.float32)
    kept = kept_ids(probs, top_k=top_k, top_p=top_p, min_p=min_p)
    truncated = np.where([i in kept for i in range(len(probs))], probs, 0).astype(np.float64)
    return truncated / truncated.sum()
