"""Attention to be judged: each feature of both kernels at real sizes, and the tests' cases."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from gpu.programs import VARIANTS, AttentionCase

from pallas_kernels.checks import STORAGE
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill
from tests.kernels import cases as shared
from tests.oracles.attention import paged_attention

NOWHERE = 10**8  # a block id that no pool has
# What rounding may do to a weighted mean, relative to the mean of magnitudes: weights are rounded
# to the type of queries, in which they are multiplied; scores have errors of float32's size.
_UNIT = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-17}
_CONTEXTS = (1, 0, 16, 17, 63, 64, 65, 700, 1999)
_NEW = (1, 0, 16, 3, 1, 21, 2, 1, 9)  # of each row, where there are prompts


def judge(case: AttentionCase, contexts: tuple[int, ...], interpret: bool) -> tuple[Any, Any, Any]:
    """What a kernel gives for rows of these lengths, what is right, and how far it may be off."""
    arrays = draw(case, contexts)
    table = np.where(arrays["block_table"] == NOWHERE, 0, arrays["block_table"])
    k, v = (_floats(case, arrays[name], arrays[f"{name}_scale"]) for name in "kv")
    is_decode = case.num_tokens is None
    rule = {"scale": case.head_dim**-0.5, "window": case.window, "soft_cap": case.soft_cap}
    num_decode_rows = len(contexts) if is_decode else 0

    def attend(q: Any, v: np.ndarray) -> np.ndarray:
        starts = arrays["query_start_loc"]
        args = (q, k, v, table, arrays["context_lens"], starts, num_decode_rows)
        return paged_attention(*args, **rule, sinks=arrays["sinks"])

    wanted = attend(arrays["q"], v)
    bound = _UNIT[case.dtype] * (attend(arrays["q"], np.abs(v)) + np.abs(wanted)) + 1e-30
    names = [name for name in arrays if arrays[name] is not None]
    names = [name for name in names if not (is_decode and name == "query_start_loc")]
    kernel = ft.partial(
        paged_decode if is_decode else paged_prefill,
        kv_dtype=case.stored,
        interpret=interpret,
        **rule,
    )
    call = jax.jit(lambda q, k, v, rest: kernel(q, k, v, **rest))
    given = {name: jnp.asarray(arrays[name]) for name in names}
    got = call(*(given.pop(name) for name in ("q", "k", "v")), given)
    return got, wanted, bound


def draw(case: AttentionCase, contexts: tuple[int, ...]) -> dict[str, Any]:
    """Arrays of the kernels' names, None where a case has none. All is NaN that nobody looks at."""
    rng = np.random.default_rng(0)
    S, K, C, B = case.block_size, case.num_kv_heads, case.head_dim, len(contexts)
    is_decode = case.num_tokens is None
    new = (
        [1] * B
        if is_decode
        else [min(n, length) for n, length in zip(_NEW, contexts, strict=False)]
    )
    widths = [-(-length // S) for length in contexts]
    N = 2 + sum(widths)
    ids = iter(1 + rng.permutation(N - 2))
    table = np.full((B, max(widths) + 1), NOWHERE, np.int32)
    storage, logical = np.dtype(STORAGE[case.stored]), jnp.dtype(case.stored)
    k, v = (np.full((N, S, K, C), _nothing(case.stored), storage) for _ in range(2))
    for row, length in enumerate(contexts):
        table[row, : widths[row]] = [next(ids) for _ in range(widths[row])]
        at = (table[row, np.arange(length) // S], np.arange(length) % S)
        for pool in (k, v):
            numbers = rng.normal(size=(length, K, C)) * (40 if case.stored == "int8" else 1)
            pool[at] = numbers.astype(logical).view(storage)
    scales = {None: None, "one": (), "each": (N, S, K)}[case.scales]
    unit = 0.02 if case.stored == "int8" else 1
    draw_scale = lambda: (  # noqa: E731
        None if scales is None else (unit * rng.uniform(0.5, 1.5, scales)).astype(np.float32)
    )
    return {
        "q": rng.normal(size=(sum(new) + 2 * (not is_decode), case.num_heads, C)).astype(
            case.dtype
        ),
        "k": k,
        "v": v,
        "block_table": table,
        "context_lens": np.array(contexts, np.int32),
        "query_start_loc": np.cumsum([0, *new]).astype(np.int32),
        "k_scale": draw_scale(),
        "v_scale": draw_scale(),
        "sinks": rng.normal(size=case.num_heads).astype(np.float32) if case.has_sinks else None,
    }


def _nothing(kv_dtype: str) -> Any:
    """What a slot holds that was never written."""
    return {"int8": 127, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F}.get(kv_dtype, np.nan)


def _floats(case: AttentionCase, pool: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """What a pool's numbers stand for, float64."""
    logical = getattr(ml_dtypes, case.stored, None) or np.dtype(case.stored)
    numbers = pool.view(logical).astype(np.float64)
    if scale is None:
        return numbers
    return numbers * (scale if scale.ndim == 0 else scale[..., None])


def _cases(contexts: tuple[int, ...], variants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of both kernels, by name."""
    judges = {}
    for what, options in variants.items():
        own = {name: value for name, value in options.items() if name != "pool_bytes"}
        if own.get("window"):
            own["window"] = max(contexts) // 3
        for kind, num_tokens in (("decode", None), ("prefill", 1)):
            case = AttentionCase(what=what, num_tokens=num_tokens, **own)
            judges[f"{kind}: {what}"] = ft.partial(judge, case, contexts)
    return judges


def judge_shared(case: shared.Case, interpret: bool) -> tuple[Any, Any, Any]:
    """A case of the tests, through the op that calls the kernels."""
    assert interpret == (jax.default_backend() == "cpu")
    inputs = shared.draw(case)
    got = shared.run(case.program, inputs, implementation="pallas", is_careful=True)
    wanted = shared.expected(case.program, inputs)
    tolerance = case.program.tolerance
    return got, wanted, tolerance["atol"] + tolerance["rtol"] * np.abs(wanted)


_LARGE = [what for what, options in VARIANTS.items() if "pool_bytes" in options]
_SHARED = shared.named_cases([*shared.PROGRAMS, *shared.MORE_PROGRAMS], num_drawn=2)
ATTENTION = {
    **_cases(_CONTEXTS, {what: one for what, one in VARIANTS.items() if what not in _LARGE}),
    **{f"paged: {case.name}": ft.partial(judge_shared, case) for case in _SHARED},
}
SMOKE_ATTENTION = _cases(
    (9, 0, 17),
    {
        "all": {
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "dtype": "float32",
            "block_size": 8,
            "kv_dtype": "int8",
            "scales": "each",
            "window": 1,
            "soft_cap": 5.0,
            "has_sinks": True,
        }
    },
)
