"""Measures the kernels in many tilings, and prints the best for `pallas_kernels/tiling.py`.

    PYTHONPATH=. python scripts/tune_kernels.py decode prefill products --seconds 500
    PYTHONPATH=. JAX_PLATFORMS=cpu python scripts/tune_kernels.py decode --smoke

For each case: how long the tiling takes that the kernel chooses by itself, and those that are
faster, best first. A tiling that the device can not run is left out, and counted.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from gpu import attention_cases
from gpu.attention_cases import Case, make_arrays
from gpu.measuring import Budget, Effort, OutOfTimeError, reason
from gpu.race_attention import kernel_seconds
from gpu.race_products import KINDS, product_seconds, random_weight

from pallas_kernels.tiling import DecodeTiling, MatmulTiling, PrefillTiling

NUM_SHOWN = 3
Measure = Callable[[Any], float]
"""Seconds of a call in a tiling; None: in the one that the kernel chooses."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line, measures and prints. Returns 1 if the time was up before the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", nargs="+", choices=KERNELS, metavar="KERNEL")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; on a CPU, interpreted")
    parser.add_argument("--seconds", type=float, default=540, help="of all (default 540)")
    args = parser.parse_args(arguments)
    effort = Effort.smoke() if args.smoke else Effort(rounds=3)
    budget = Budget(args.seconds)
    print(f"# {jax.devices()[0].device_kind}, jax {jax.__version__}")
    try:
        for kernel in args.kernels:
            for line in KERNELS[kernel](effort, budget):
                print(line, flush=True)
    except OutOfTimeError:
        print("# no time left for the rest: name fewer kernels, or give --seconds")
        return 1
    return 0


def compare(case: str, measure: Measure, tilings: Sequence[Any], budget: Budget) -> Iterator[str]:
    """The lines of a case: the time of its own tiling, then the tilings that are faster."""
    own = measure(None)
    seconds: dict[Any, float] = {}
    said = ""
    for tiling in tilings:
        budget.check()
        try:
            seconds[tiling] = measure(tiling)
        except Exception as error:  # most will say that there is too little shared memory
            said = reason(error)
    num_left_out = len(tilings) - len(seconds)
    yield f"# {case}: {own * 1e6:.1f} us as chosen; {len(seconds)} tilings measured" + (
        f", {num_left_out} left out, the last with {said}" if num_left_out else ""
    )
    for tiling in sorted(seconds, key=seconds.__getitem__)[:NUM_SHOWN]:
        yield f"{short(tiling)},  # {seconds[tiling] * 1e6:.1f} us, {own / seconds[tiling]:.2f} x"


def short(tiling: Any) -> str:
    """A tiling as code."""
    values = ", ".join(f"{name}={value}" for name, value in vars(tiling).items())
    return f"{type(tiling).__name__}({values})"


# --- attention ---


def decode(effort: Effort, budget: Budget) -> Iterator[str]:
    """Tiles of keys, splits, warps, stages."""
    grid = itertools.product(*([(16,), (1, 2), (4,), (2,)] if effort.is_smoke else _DECODE))
    tilings = [
        DecodeTiling(tile_kv=tile_kv, num_splits=splits, num_warps=warps, num_stages=stages)
        for tile_kv, splits, warps, stages in grid
    ]
    cases = attention_cases.SMOKE_DECODE if effort.is_smoke else attention_cases.DECODE
    yield from _attention(cases, tilings, effort, budget)


def prefill(effort: Effort, budget: Budget) -> Iterator[str]:
    """Tiles of queries and keys, warps, stages."""
    grid = itertools.product(*([(16,), (16, 32), (4,), (2,)] if effort.is_smoke else _PREFILL))
    tilings = [
        PrefillTiling(tile_q=tile_q, tile_kv=tile_kv, num_warps=warps, num_stages=stages)
        for tile_q, tile_kv, warps, stages in grid
    ]
    cases = attention_cases.SMOKE_PREFILL if effort.is_smoke else attention_cases.PREFILL
    yield from _attention(cases, tilings, effort, budget)


_DECODE = ((32, 64, 128), (1, 2, 4, 8, 16), (4, 8), (2, 5))
_PREFILL = ((64, 128), (32, 64, 128), (4, 8), (2, 3, 5))


def _attention(
    cases: Sequence[Case], tilings: Sequence[Any], effort: Effort, budget: Budget
) -> Iterator[str]:
    for case in cases:
        arrays = make_arrays(case)

        def measure(tiling: Any, case: Case = case, arrays: Any = arrays) -> float:
            return kernel_seconds(case, arrays, effort, tiling)

        heads = f"{case.num_heads}/{case.num_kv_heads} heads of {case.head_dim}"
        yield from compare(f"{case.name}, {heads}, {case.kv_dtype}", measure, tilings, budget)


# --- products ---


def products(effort: Effort, budget: Budget) -> Iterator[str]:
    """Tiles of rows, outputs and inputs, splits, warps, stages; of both products of an MLP."""
    D, F = (128, 256) if effort.is_smoke else (4096, 14336)
    for M in (2,) if effort.is_smoke else (1, 16, 64, 512):
        grid = itertools.product(
            *([(16,), (32,), (32, 64), (1,), (4,), (2,)] if effort.is_smoke else _products(M))
        )
        tilings = [
            MatmulTiling(tile_m=m, tile_f=f, tile_d=d, num_splits=s, num_warps=w, num_stages=n)
            for m, f, d, s, w, n in grid
        ]
        x = jax.random.normal(jax.random.key(0), (M, D), jnp.bfloat16)
        for kind, group, zeros in KINDS[:1] if effort.is_smoke else KINDS:
            weights = tuple(random_weight(d, f, kind, group, zeros) for d, f in ((D, F), (F, D)))

            def measure(tiling: Any, x: jax.Array = x, weights: Any = weights) -> float:
                return product_seconds(x, weights, effort, tiling and (tiling, tiling))

            case = f"{M} rows, {kind}, {f'groups of {group}' if group else 'a scale per output'}"
            yield from compare(case, measure, tilings, budget)


def _products(M: int) -> tuple[tuple[int, ...], ...]:
    tile_m = (16,) if M <= 16 else (32, 64) if M <= 64 else (64, 128)
    return tile_m, (32, 64, 128), (32, 64, 128), (1, 2, 4) if M <= 64 else (1,), (4, 8), (2, 5)


KERNELS: dict[str, Callable[[Effort, Budget], Iterator[str]]] = {
    "decode": decode,
    "prefill": prefill,
    "products": products,
}


if __name__ == "__main__":
    sys.exit(main())
