"""Parts `decode` and `prefill`: the attention kernels' speed, and others' on the same arrays."""

import functools as ft
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from gpu import attention_cases
from gpu.attention_cases import Arrays, Case, make_arrays
from gpu.measuring import Budget, Device, Effort, reason, seconds_per_call
from gpu.rivals import rivals_of

from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill


def decode(device: Device, effort: Effort, budget: Budget) -> Iterator[dict[str, Any]]:
    """One query per row: bound by the memory's bandwidth."""
    cases = attention_cases.SMOKE_DECODE if effort.is_smoke else attention_cases.DECODE
    yield from race(cases, device, effort, budget)


def prefill(device: Device, effort: Effort, budget: Budget) -> Iterator[dict[str, Any]]:
    """Many queries per row: bound by products."""
    cases = attention_cases.SMOKE_PREFILL if effort.is_smoke else attention_cases.PREFILL
    yield from race(cases, device, effort, budget)


def race(
    cases: Sequence[Case], device: Device, effort: Effort, budget: Budget
) -> Iterator[dict[str, Any]]:
    """A row for each case: the kernel's figures, and how many times as fast it is as others.

    The kernels of all cases come first: rivals have what time is left.
    """
    ours = {}
    for case in cases:
        budget.check()
        try:
            ours[case] = kernel_seconds(case, make_arrays(case), effort)
        except Exception as error:  # another case may run
            yield {**case.told(), "error": reason(error)}
            continue
        work = {"num_bytes": case.num_bytes, "num_flops": case.num_flops}
        yield {**case.told(), **device.figures(ours[case], **work)}
    for case, seconds in ours.items():
        budget.check()
        yield {**case.told(), "times_as_fast_as": _against(case, seconds, effort, budget)}


def _against(case: Case, ours: float, effort: Effort, budget: Budget) -> dict[str, float | str]:
    arrays, ratios = make_arrays(case), {}
    for name, rival in rivals_of(case):
        if budget.left < 0:
            break
        try:
            ratios[name] = round(rival(case, arrays, effort) / ours, 3)
        except Exception as error:  # it is not installed, or can not do this
            ratios[name] = reason(error)
    return ratios


def kernel_seconds(case: Case, arrays: Arrays, effort: Effort, tiling: Any = None) -> float:
    """Seconds of a call of the kernel, in the given tiling or the one that it chooses."""

    def attend(q: jax.Array, arrays: Arrays) -> jax.Array:
        rows = {"block_table": arrays.block_table, "context_lens": arrays.context_lens}
        kernel = paged_decode
        if not case.is_decode:
            kernel = ft.partial(paged_prefill, query_start_loc=arrays.query_start_loc)
        return kernel(
            q,
            arrays.k,
            arrays.v,
            **rows,
            kv_dtype=case.kv_dtype,
            k_scale=arrays.k_scale,
            v_scale=arrays.v_scale,
            scale=case.head_dim**-0.5,
            window=case.window,
            tiling=tiling,
            interpret=effort.interpret,
        )

    return seconds_per_call(attend, arrays.q, arrays, effort=effort)
