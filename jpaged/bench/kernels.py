"""Paged attention and products alone: each implementation there is, in turns on the same arrays.

A table of cases, each a line of figures. What a call reads changes from call to call, so that it
does not lie in a core's own caches, as it would not in a step with many layers.
"""

import dataclasses
import functools as ft
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.bench import report
from jpaged.bench.machine import LoadClock
from jpaged.config import EngineConfig
from jpaged.engine import compiled, implementation
from jpaged.model_config import ModelConfig
from jpaged.models.prepare import param_bytes
from jpaged.ops.grouped import quantize
from jpaged.ops.kv_cache import LayerKV, init_layer_kv, write_kv
from jpaged.ops.packed import pack

COLD_BYTES = 64 * 2**20  # what the calls of a case read before they read the same again
MIN_SECONDS = 0.3  # of a case: the load of the machine is told in ticks of 10 ms
_MAX_COPIES = 64

Form = Callable[[int], jax.Array]
"""Starts call number i of an implementation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What a layer of a model is made of. The defaults are SmolLM2-135M's."""

    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    hidden_size: int = 576
    intermediate_size: int = 1536
    vocab_size: int = 49152

    @classmethod
    def of(cls, model: ModelConfig) -> "Shape":
        """That of a model."""
        return cls(**{field.name: getattr(model, field.name) for field in dataclasses.fields(cls)})

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """The weights of a layer and the head, `[D F]`, as a step multiplies with them."""
        D, F, C = self.hidden_size, self.intermediate_size, self.head_dim
        return {
            "qkv": (D, (self.num_heads + 2 * self.num_kv_heads) * C),
            "o": (self.num_heads * C, D),
            "gate_up": (D, 2 * F),
            "down": (F, D),
            "head": (D, self.vocab_size),
        }


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """rows: (context_len, num_new) of each; is_decode: they are decoding rows, of one query."""

    name: str
    rows: Sequence[tuple[int, int]]
    is_decode: bool = True

    @property
    def num_pairs(self) -> int:
        """Queries times the positions that each sees."""
        return sum(new * (length - new) + new * (new + 1) // 2 for length, new in self.rows)


ATTENTION_CASES = (
    AttentionCase("decode, 2 rows of 128", [(128, 1)] * 2),
    AttentionCase("decode, 2 rows of 4096", [(4096, 1)] * 2),
    AttentionCase("decode, 16 rows of 512", [(512, 1)] * 16),
    AttentionCase("decode, 64 rows of 512", [(512, 1)] * 64),
    AttentionCase("decode, 64 rows of 16 to 1024", [(16 + 16 * i, 1) for i in range(64)]),
    AttentionCase("prefill, 512", [(512, 512)], is_decode=False),
    AttentionCase("prefill, 512 behind 3584", [(4096, 512)], is_decode=False),
    AttentionCase("prefill, 8 rows of 16 to 128", [(16 * i, 16 * i) for i in range(1, 9)], False),
)
NUM_ROWS = (2, 16, 64, 512)  # of products
_MOST_HEAD_ROWS = 64  # the head multiplies the rows that sample


def measure(
    shape: Shape,
    *,
    dtype: str,
    reps: int,
    cases: Sequence[AttentionCase] = ATTENTION_CASES,
    num_rows: Sequence[int] = NUM_ROWS,
    cold_bytes: int = COLD_BYTES,
) -> Iterator[dict[str, Any]]:
    """Times every case, at least `reps` calls of each implementation and MIN_SECONDS. Yields
    figures that JSON can hold.

    ms: the median call. gb_per_s, gflop_per_s: what a call must read and write, and compute, by
    it. times_as_fast: as XLA's form.
    """
    names = _implementations()
    for case in cases:
        yield _measure_attention(shape, case, names, dtype, reps, cold_bytes)
    for name, size in shape.weights.items():
        rows = [n for n in num_rows if name != "head" or n <= _MOST_HEAD_ROWS]
        yield from _measure_products(name, size, rows, names, dtype, reps, cold_bytes)


def _implementations() -> list[str]:
    """Those of attention, the plainest first."""
    config = implementation.resolve(EngineConfig(), device=jax.devices()[0])
    return list(dict.fromkeys(["xla", config.implementation]))


# --- attention ---


def _measure_attention(
    shape: Shape,
    case: AttentionCase,
    names: Sequence[str],
    dtype: str,
    reps: int,
    cold_bytes: int,
) -> dict[str, Any]:
    H, K, C = shape.num_heads, shape.num_kv_heads, shape.head_dim
    itemsize = jnp.dtype(dtype).itemsize
    num_new = [new for _, new in case.rows]
    kv_bytes = 2 * sum(length for length, _ in case.rows) * K * C * itemsize
    copies = _num_copies(kv_bytes, cold_bytes)
    kv, tables = _paged(case, shape, dtype, copies)
    q = jax.random.normal(jax.random.key(0), (sum(num_new), H, C), jnp.dtype(dtype))
    starts = jnp.asarray([sum(num_new[:i]) for i in range(len(num_new) + 1)], jnp.int32)
    lengths = jnp.asarray([length for length, _ in case.rows], jnp.int32)

    def call(i: int, name: str) -> jax.Array:
        return compiled.attend(
            q,
            kv,
            block_table=tables[i % copies],
            context_lens=lengths,
            query_start_loc=starts,
            num_decode_rows=len(case.rows) if case.is_decode else 0,
            scale=C**-0.5,
            window=None,
            soft_cap=None,
            implementation=name,
        )

    forms = {name: ft.partial(call, name=name) for name in names}
    return {
        "op": "paged_attention",
        "case": case.name,
        "heads": [H, K, C],
        "dtype": dtype,
        **_figures(
            forms,
            reps,
            num_bytes=dict.fromkeys(names, kv_bytes + 2 * q.size * itemsize),
            num_flops=4 * H * C * case.num_pairs,
        ),
    }


def _paged(
    case: AttentionCase, shape: Shape, dtype: str, copies: int
) -> tuple[LayerKV, list[jax.Array]]:
    """A pool of random KV, and tables that lay the rows out in it, each in blocks of its own."""
    S = EngineConfig().cache.block_size
    widths = [-(-length // S) for length, _ in case.rows]
    N = 1 + copies * sum(widths)
    kv = init_layer_kv(
        N, S, shape.num_kv_heads, shape.head_dim, dtype, jax.devices()[0].platform == "cpu"
    )
    k, v = jax.random.normal(
        jax.random.key(1), (2, N * S, shape.num_kv_heads, shape.head_dim), jnp.dtype(dtype)
    )
    kv = write_kv(kv, k, v, jnp.arange(N * S, dtype=jnp.int32))
    block_ids = list(range(1, N))
    random.Random(0).shuffle(block_ids)
    tables = []
    for _ in range(copies):
        rows = [[block_ids.pop() for _ in range(width)] for width in widths]
        padded = [row + [0] * (max(widths) - len(row)) for row in rows]
        tables.append(jnp.asarray(padded, jnp.int32))
    return kv, tables


# --- products ---


def _ways_to_hold(weight: jax.Array, names: Sequence[str]) -> dict[str, Any]:
    """A weight by implementation: its type chooses the arithmetic."""
    if "native" not in names:
        return {"xla": weight}
    quantized = {f"native {bits}": pack(quantize(weight, bits)) for bits in ("int8", "int4")}
    return {"xla": weight, "native": pack(weight), **quantized}


def _measure_products(
    name: str,
    size: tuple[int, int],
    num_rows: Sequence[int],
    names: Sequence[str],
    dtype: str,
    reps: int,
    cold_bytes: int,
) -> Iterator[dict[str, Any]]:
    D, F = size
    itemsize = jnp.dtype(dtype).itemsize
    weight = jax.random.normal(jax.random.key(1), size, jnp.dtype(dtype))
    held = _ways_to_hold(weight, names)
    sizes = {kind: param_bytes({"weight": one}) for kind, one in held.items()}
    copies = {
        kind: [jax.tree.map(jnp.copy, one) for _ in range(_num_copies(sizes[kind], cold_bytes))]
        for kind, one in held.items()
    }
    for rows in num_rows:
        x = jax.random.normal(jax.random.key(0), (rows, D), jnp.dtype(dtype))

        def call(i: int, weights: list[Any], x: jax.Array) -> jax.Array:
            return compiled.multiply(weights[i % len(weights)], x, dtype=dtype)

        num_bytes = {kind: size + rows * (D + F) * itemsize for kind, size in sizes.items()}
        forms = {kind: ft.partial(call, weights=copies[kind], x=x) for kind in held}
        yield {
            "op": "linear",
            "case": f"{name}, {rows} rows",
            "weight": [D, F],
            "dtype": dtype,
            **_figures(forms, reps, num_bytes=num_bytes, num_flops=2 * rows * D * F),
        }


# --- the race ---


def _num_copies(num_bytes: int, cold_bytes: int) -> int:
    return min(math.ceil(cold_bytes / num_bytes), _MAX_COPIES)


def _figures(
    forms: Mapping[str, Form], reps: int, *, num_bytes: Mapping[str, int], num_flops: int
) -> dict[str, Any]:
    for form in forms.values():
        form(0).block_until_ready()  # compiles
    with LoadClock() as clock:
        seconds = _race(forms, reps)
    first = seconds[next(iter(forms))]
    return {
        "ms": _rounded({name: x * 1e3 for name, x in seconds.items()}),
        "gb_per_s": _rounded({name: num_bytes[name] / x / 1e9 for name, x in seconds.items()}),
        "gflop_per_s": _rounded({name: num_flops / x / 1e9 for name, x in seconds.items()}),
        "times_as_fast": _rounded({name: first / x for name, x in seconds.items()}),
        **report.load([clock]),
        **report.machine(),
    }


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{x:.4g}") for name, x in figures.items()}


def _race(forms: Mapping[str, Form], reps: int) -> dict[str, float]:
    """Median seconds of a call. All take turns, to meet the same load."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    begun = time.perf_counter()
    for i in itertools.count():
        if i >= reps and time.perf_counter() - begun >= MIN_SECONDS:
            break
        for name, form in forms.items():
            start = time.perf_counter()
            form(i).block_until_ready()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}
