"""Every kernel, and every feature of it, as a program to compile: nothing here is ever run.

Owns the list that the lowering test and `scripts/aot_check.py` go through. Arguments are shapes of
real models; pools are as large as they would be, since no array is made.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import kv_write
from pallas_kernels.block_copy import block_copy
from pallas_kernels.checks import STORAGE
from pallas_kernels.paged_decode import paged_decode
from pallas_kernels.paged_prefill import paged_prefill
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.quant_weight import QuantWeight

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A jittable function and the shapes of its arguments.

    kernel: the module's name, with which the names of its kernels begin.
    donated: positions of arguments that it writes in place. cache_bytes: the size of one array of
    the cache, which a program may not hold a second time; 0 without one.
    multiplies: its products belong on tensor cores. copies_ahead: what it reads belongs into shared
    memory by asynchronous copies.
    """

    name: str
    kernel: str
    shape: str
    dtype: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...] = ()
    cache_bytes: int = 0
    multiplies: bool = True
    copies_ahead: bool = True


def shaped(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array that is not there."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


# --- attention ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """What attention works on. num_tokens: queries, one per row where it is None; scales: of the
    cache, "one" for all or "each" token and head; pool_bytes: at least, of each of K and V."""

    what: str
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    num_rows: int = 64
    context: int = 4096
    num_tokens: int | None = None
    block_size: int = 16
    scales: str | None = None
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    pool_bytes: int = 0

    @property
    def stored(self) -> str:
        """The logical type of the cache."""
        return self.kv_dtype or self.dtype

    @property
    def is_widened(self) -> bool:
        """Whether the cache's numbers become float32 to be multiplied."""
        return "float32" in (self.dtype, self.stored) and self.dtype != self.stored

    @property
    def pool(self) -> jax.ShapeDtypeStruct:
        """K or V, `[N S K C]`."""
        block = (self.block_size, self.num_kv_heads, self.head_dim)
        storage = jnp.dtype(STORAGE[self.stored])
        least = self.pool_bytes // (block[0] * block[1] * block[2] * storage.itemsize)
        num_blocks = 1 + max(self.num_rows * self.table[1], least)
        return shaped((num_blocks, *block), storage)

    @property
    def table(self) -> tuple[int, int]:
        """The shape of the block table."""
        return self.num_rows, -(-self.context // self.block_size)


def attention_program(case: AttentionCase) -> Program:
    """The program of a case: `paged_decode`, or `paged_prefill` where it has queries to pack."""
    pool, (B, M) = case.pool, case.table
    T = B if case.num_tokens is None else case.num_tokens
    q = shaped((T, case.num_heads, case.head_dim), case.dtype)
    arrays = {"block_table": shaped((B, M), jnp.int32), "context_lens": shaped((B,), jnp.int32)}
    kernel, kind = paged_decode, "decode"
    if case.num_tokens is not None:
        kernel, kind = paged_prefill, "prefill"
        arrays["query_start_loc"] = shaped((B + 1,), jnp.int32)
    if case.scales is not None:
        scale = shaped(() if case.scales == "one" else pool.shape[:3], jnp.float32)
        arrays |= {"k_scale": scale, "v_scale": scale}
    if case.has_sinks:
        arrays["sinks"] = shaped((case.num_heads,), jnp.float32)
    call = ft.partial(
        kernel,
        kv_dtype=case.stored,
        scale=case.head_dim**-0.5,
        window=case.window,
        soft_cap=case.soft_cap,
    )
    heads = f"{case.num_heads}/{case.num_kv_heads} heads of {case.head_dim}"
    return Program(
        name=f"{kind}: {case.what}",
        kernel=kernel.__name__,
        shape=f"{T} queries, {B} x {case.context:,}, {heads}, blocks of {case.block_size}",
        dtype=case.dtype if case.kv_dtype is None else f"{case.dtype} over {case.kv_dtype}",
        function=lambda q, k, v, arrays: call(q, k, v, **arrays),
        args=(q, pool, pool, arrays),
        cache_bytes=pool.size * pool.dtype.itemsize,
        multiplies="float32" not in (case.dtype, case.stored),
        copies_ahead=not (case.is_widened and case.head_dim > 128),
    )


HEAD_DIMS = (64, 80, 96, 112, 192, 256)
_ALL = {"window": 1024, "soft_cap": 50.0, "has_sinks": True}
_WIDENED = {"dtype": "float32", "kv_dtype": "bfloat16", "head_dim": 256}
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "float32 over bfloat16": {"dtype": "float32", "kv_dtype": "bfloat16"},
    "float32 over bfloat16, head dim 256": _WIDENED,
    "float32 over bfloat16, all": {**_WIDENED, "head_dim": 192, **_ALL},
    "float32 over int8, scales": {**_WIDENED, "kv_dtype": "int8", "scales": "each"},
    **{f"head dim {dim}": {"head_dim": dim} for dim in HEAD_DIMS},
    "no group": {"num_kv_heads": 32},
    "group of 7": {"num_heads": 28, "num_kv_heads": 4},
    "group of 16": {"num_heads": 32, "num_kv_heads": 2},
    "one KV head": {"num_heads": 71, "num_kv_heads": 1, "head_dim": 64},
    "window": {"window": 1024},
    "soft cap": {"soft_cap": 50.0},
    "sinks": {"has_sinks": True},
    "window, soft cap, sinks": _ALL,
    "int8, one scale": {"kv_dtype": "int8", "scales": "one"},
    "int8, scales": {"kv_dtype": "int8", "scales": "each"},
    "e4m3, one scale": {"kv_dtype": "float8_e4m3fn", "scales": "one"},
    "e4m3, scales": {"kv_dtype": "float8_e4m3fn", "scales": "each"},
    "e4m3, all": {"kv_dtype": "float8_e4m3fn", "scales": "each", **_ALL},
    "e4m3, float16": {"dtype": "float16", "kv_dtype": "float8_e4m3fn", "scales": "one"},
    "e4m3, head dim 64": {"head_dim": 64, "kv_dtype": "float8_e4m3fn", "scales": "one"},
    "e5m2, one scale": {"kv_dtype": "float8_e5m2", "scales": "one"},
    "blocks of 1": {"block_size": 1},
    "blocks of 24": {"block_size": 24},
    "pool of 5 GiB": {"pool_bytes": 5 * GIB},
    "e4m3, pool of 5 GiB": {"kv_dtype": "float8_e4m3fn", "scales": "one", "pool_bytes": 5 * GIB},
}


def _attention() -> Iterator[Program]:
    prompts = {"num_rows": 8, "num_tokens": 2048}
    for what, options in VARIANTS.items():
        yield attention_program(AttentionCase(what=what, **options))
        yield attention_program(AttentionCase(what=what, **prompts, **options))
    yield attention_program(AttentionCase(what="1 row of 131,072", num_rows=1, context=131_072))
    # A step whose rows have several tokens each: speculation, or `deterministic`.
    yield attention_program(AttentionCase(what="4 tokens a row", num_rows=64, num_tokens=256))


# --- writing ---


def write_program(
    what: str, kv_dtype: str, *, scales: str | None = None, turns: bool = False, head_dim: int = 128
) -> Program:
    """A step's new keys and values into their slots. turns: RoPE is part of it."""
    T, H = 512, 32
    case = AttentionCase(what=what, head_dim=head_dim, kv_dtype=kv_dtype, scales=scales)
    pool = case.pool
    scale = {None: None, "one": (), "each": pool.shape[:3]}[scales]
    scale = None if scale is None else shaped(scale, jnp.float32)
    new = shaped((T, case.num_kv_heads, head_dim), case.dtype)
    slots = shaped((T,), jnp.int32)
    pools, args = (pool, pool, scale, scale), (new, new, slots)
    if turns:
        angles = shaped((T, head_dim // 2), jnp.float32)
        args = (shaped((T, H, head_dim), case.dtype), new, new, angles, angles, slots)
    function = ft.partial(
        kv_write.turn_and_write if turns else kv_write.write_kv, kv_dtype=kv_dtype
    )
    return Program(
        name=f"write: {what}",
        kernel="kv_write",
        shape=f"{T} tokens, {case.num_kv_heads} heads of {head_dim}",
        dtype=f"{case.dtype} into {kv_dtype}",
        function=lambda pools, *args: function(kv_write.Pools(*pools), *args),
        args=(pools, *args),
        donated=(0,),
        cache_bytes=pool.size * pool.dtype.itemsize,
        multiplies=False,
        copies_ahead=False,
    )


def _writes() -> Iterator[Program]:
    for kv_dtype in STORAGE:
        yield write_program(kv_dtype, kv_dtype)
        if STORAGE[kv_dtype] in (jnp.int8, jnp.uint8):
            yield write_program(f"{kv_dtype}, one scale", kv_dtype, scales="one")
            yield write_program(f"{kv_dtype}, scales", kv_dtype, scales="each")
    yield write_program("with RoPE", "bfloat16", turns=True)
    yield write_program("with RoPE, head dim 80", "bfloat16", turns=True, head_dim=80)
    yield write_program("with RoPE, e4m3, scales", "float8_e4m3fn", scales="each", turns=True)


def copy_program(what: str, kv_dtype: str, *, scales: str | None = None) -> Program:
    """Blocks over others, as a fork writes them."""
    case, W = AttentionCase(what=what, kv_dtype=kv_dtype, scales=scales), 64
    pool = case.pool
    pools = (
        (pool, pool) if scales is None else (pool, pool, *[shaped(pool.shape[:3], "float32")] * 2)
    )
    ids = shaped((W,), jnp.int32)
    return Program(
        name=f"copy: {what}",
        kernel="block_copy",
        shape=f"{W} blocks of {case.block_size}, {case.num_kv_heads} heads of {case.head_dim}",
        dtype=kv_dtype,
        function=block_copy,
        args=(pools, ids, ids),
        donated=(0,),
        cache_bytes=pool.size * pool.dtype.itemsize,
        multiplies=False,
        copies_ahead=False,
    )


def _copies() -> Iterator[Program]:
    yield copy_program("bfloat16", "bfloat16")
    yield copy_program("int8, scales", "int8", scales="each")


# --- products ---


def product_program(
    what: str,
    kind: str,
    num_rows: int,
    *,
    group: int = 0,
    columns: int = 1,
    dtype: str = "bfloat16",
    **offsets: Any,
) -> Program:
    """Rows times a quantized [4096, 14336], an MLP's of Llama-3.1-8B.

    group: inputs with one scale, 0: all of them; columns: outputs with one. offsets: zeros or
    leasts, by their dtype, and whether there is an order.
    """
    D, F = 4096, 14336
    stored = D // 2 if kind == "int4" else D
    has_order = offsets.pop("order", False)
    inputs_per_scale = group or D
    rows = D // inputs_per_scale
    arrays: dict[str, Any] = {
        "numbers": shaped((F, stored), jnp.int8 if kind == "int8" else jnp.uint8),
        "scales": shaped((rows, F // columns), jnp.float32),
        "order": shaped((D,), jnp.int32) if has_order else None,
        **{name: shaped((rows, F), offset) for name, offset in offsets.items()},
    }
    weight = QuantWeight(
        **arrays,
        kind=kind,
        num_inputs=D,
        inputs_per_scale=inputs_per_scale,
        outputs_per_scale=columns,
    )
    return Program(
        name=f"product: {what}, {num_rows} rows",
        kernel="quant_matmul",
        shape=f"[{num_rows}, {D}] x [{D}, {F}]",
        dtype=f"{dtype} over {kind}",
        function=quant_matmul,
        args=(shaped((num_rows, D), dtype), weight),
        multiplies=dtype != "float32",
    )


def _products() -> Iterator[Program]:
    for M in (1, 16, 64, 512):
        yield product_program("AWQ's int4", "int4", M, group=128, zeros=jnp.uint8)
        yield product_program("int4", "int4", M, group=32)
        yield product_program("int8", "int8", M)
        yield product_program("e4m3", "float8_e4m3fn", M)
    yield product_program(
        "GPTQ's int4 in order", "int4", 16, group=128, zeros=jnp.uint8, order=True
    )
    yield product_program("GGUF's int4", "int4", 16, group=32, leasts=jnp.float32)
    yield product_program("int8 in groups", "int8", 16, group=32)
    yield product_program("e4m3 in blocks", "float8_e4m3fn", 16, group=128, columns=128)
    yield product_program("e5m2", "float8_e5m2", 16)
    yield product_program("int4, float16", "int4", 16, group=128, dtype="float16")
    yield product_program("int8, float32", "int8", 16, dtype="float32")


def _by_name(*parts: Iterator[Program]) -> dict[str, Program]:
    programs = [program for part in parts for program in part]
    assert len(programs) == len({program.name for program in programs})
    return {program.name: program for program in programs}


PROGRAMS = _by_name(_attention(), _writes(), _copies(), _products())
"""All of them, by name."""
