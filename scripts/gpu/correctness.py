"""Part `correct`: compiled kernels against float64 in NumPy, feature by feature, at real sizes.

A case tells the largest error as a share of what rounding may do; above 1 it is wrong. Pools hold
NaN where nobody looks, and tables ids that are nowhere.
"""

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from gpu.judged_attention import ATTENTION, SMOKE_ATTENTION
from gpu.judged_pool import POOL
from gpu.judged_products import PRODUCTS
from gpu.measuring import Budget, Device, Effort, reason, rounded

Judge = Callable[[bool], tuple[Any, Any, Any]]
"""interpret -> what a kernel gave, what is right, and how far apart they may be."""


def correct(
    device: Device, effort: Effort, budget: Budget, *, known: set[str]
) -> Iterator[dict[str, Any]]:
    """A row for each case that is not known already: `is_right`, and `of_bound`."""
    del device
    cases: dict[str, Judge] = {**POOL, **PRODUCTS, **ATTENTION}
    if effort.is_smoke:
        cases = {**SMOKE_ATTENTION, **_first(POOL), **_first(PRODUCTS)}
    left = {name: judge for name, judge in cases.items() if name not in known}
    # Compilers and NumPy work beside the device: several cases are on their way at once.
    workers = 1 if effort.is_smoke else max((os.cpu_count() or 2) // 2, 1)
    with ThreadPoolExecutor(workers) as pool:

        def judge(name: str) -> dict[str, Any] | None:
            return None if budget.left < 0 else judged(name, left[name], interpret=effort.interpret)

        for row in pool.map(judge, left):
            if row is None:
                budget.check()
            else:
                yield row


def judged(name: str, judge: Judge, *, interpret: bool) -> dict[str, Any]:
    """A case's row."""
    try:
        got, wanted, bound = jax.tree.map(lambda x: np.asarray(x, np.float64), judge(interpret))
        shares = jax.tree.leaves(jax.tree.map(_worst, got, wanted, bound))
    except Exception as error:  # others may run
        return {"case": name, "is_right": False, "error": reason(error)}
    worst = max(shares)
    told = rounded(worst) if math.isfinite(worst) else None  # JSON has no infinity
    return {"case": name, "is_right": bool(worst <= 1), "of_bound": told}


def _worst(got: np.ndarray, wanted: np.ndarray, bound: np.ndarray) -> float:
    """The largest error as a share of its bound; infinite for a wrong shape or NaN."""
    if got.shape != wanted.shape:
        return float("inf")
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(got == wanted, 0, np.abs(got - wanted) / bound)
    return float(np.max(np.nan_to_num(shares, nan=np.inf), initial=0))


def _first(cases: dict[str, Judge]) -> dict[str, Judge]:
    return dict(list(cases.items())[:2])
