"""Attention over pages: the cases that every implementation must pass, and what judges them.

A `Program` is what is compiled once: shapes, types, a rule. A `Case` is a program with the lengths
of its rows. The pools hold NaN, or the worst there is, wherever nobody may look; a table names such
blocks past a row's own, or, for those who read a table with care, blocks that do not exist.

    for case in named_cases():
        inputs = draw(case)
        got = run(case.program, inputs, implementation="pallas", is_careful=True)
        wanted = expected(case.program, inputs)
        check(case.program, wanted, got, case.name)
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jpaged.kv_format import Scales
from jpaged.ops.kv_cache import LayerKV
from jpaged.ops.paged_attention import paged_attention
from tests.oracles import attention as oracle

Rows = Sequence[tuple[int, int]]
"""(context_len, num_new) of each row."""

MAX_CONTEXT = 2000
MAX_TOTAL = 4096  # of a case's contexts together
NOWHERE = 2**30  # a block id that no pool has
TOLERANCE = {
    "float32": {"rtol": 2e-5, "atol": 2e-5},
    # Queries, keys, values and weights are rounded to 8 bits, the result once more.
    "bfloat16": {"rtol": 2e-2, "atol": 2e-2},
    "float16": {"rtol": 2e-3, "atol": 2e-3},
}
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """dtype: of queries and results. kv_dtype: the logical one, by default the same.

    heads: (H, K, C). scale: None is C**-0.5.
    """

    name: str = ""
    dtype: str = "float32"
    kv_dtype: str | None = None
    scales: Scales = "none"
    heads: tuple[int, int, int] = (6, 2, 24)
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    scale: float | None = None
    num_decode_rows: int = 4
    num_rows: int = 8
    num_tokens: int = 64
    table_width: int | None = None
    num_blocks: int | None = None

    @property
    def stored(self) -> str:
        """The logical dtype of the pools."""
        return self.kv_dtype or self.dtype

    @property
    def rule(self) -> dict[str, Any]:
        """The static arguments of an attention, but for its implementation."""
        scale = self.heads[2] ** -0.5 if self.scale is None else self.scale
        return {"scale": scale, "window": self.window, "soft_cap": self.soft_cap}

    @property
    def tolerance(self) -> dict[str, float]:
        """That of the coarsest type in which something is multiplied.

        Numbers of 8 bits are multiplied in the queries' type.
        """
        types = {self.dtype, self.stored} & set(TOLERANCE)
        return max((TOLERANCE[x] for x in types), key=lambda tolerance: tolerance["rtol"])


class Case(NamedTuple):
    """A program, and rows that fit it."""

    name: str
    program: Program
    rows: Rows
    seed: int


class Inputs(NamedTuple):
    """NumPy arrays. q [T H C]; pools [N S K C] as they are stored: float8 as uint8 bits.

    block_table: past a row's blocks it names blocks full of NaN. far_table: there, NOWHERE.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_scale: np.ndarray | None
    v_scale: np.ndarray | None
    block_table: np.ndarray
    far_table: np.ndarray
    context_lens: np.ndarray
    query_start_loc: np.ndarray
    sinks: np.ndarray | None


# --- what is run ---

# Block sizes, groups, dtypes with their scales and rules, mixed: few programs, many cases.
PROGRAMS = (
    Program(name="plain float32"),
    Program(name="blocks of 1, window", block_size=1, heads=(4, 4, 16), window=33),
    Program(
        name="bfloat16, blocks of 8, cap",
        dtype="bfloat16",
        block_size=8,
        heads=(8, 1, 64),
        soft_cap=3.0,
    ),
    Program(
        name="bfloat16, blocks of 32, window, cap, sinks",
        dtype="bfloat16",
        block_size=32,
        heads=(16, 1, 24),
        window=130,
        soft_cap=5.0,
        has_sinks=True,
    ),
    Program(name="float16, sinks", dtype="float16", heads=(5, 1, 80), has_sinks=True),
    Program(
        name="int8 by token and head, bfloat16",
        dtype="bfloat16",
        kv_dtype="int8",
        scales="token_head",
        heads=(6, 2, 64),
    ),
    Program(
        name="e4m3 by tensor, window, cap",
        kv_dtype="float8_e4m3fn",
        scales="tensor",
        block_size=8,
        heads=(12, 1, 32),
        window=1,
        soft_cap=8.0,
    ),
    Program(
        name="e5m2, float16, sinks",
        dtype="float16",
        kv_dtype="float8_e5m2",
        block_size=32,
        heads=(7, 1, 40),
        window=700,
        has_sinks=True,
        scale=0.1,
    ),
)


def _wide_sweep() -> Iterator[Program]:
    """A program for each group size from 1 to 16, with all else in turns."""
    kinds = [
        ("float32", "float32", "none"),
        ("bfloat16", "bfloat16", "none"),
        ("float16", "float16", "none"),
        ("bfloat16", "int8", "token_head"),
        ("float16", "float8_e4m3fn", "token_head"),
        ("bfloat16", "float8_e4m3fn", "none"),
        ("bfloat16", "float8_e5m2", "token_head"),
        ("float32", "int8", "tensor"),
        ("float32", "bfloat16", "none"),
        ("bfloat16", "float32", "none"),
    ]
    for i in range(16):
        dtype, kv_dtype, scales = kinds[i % len(kinds)]
        K, C = (1, 2, 3)[i % 3], (64, 80, 96, 112, 128, 192, 256)[i % 7]
        window, soft_cap = (None, 40, 257)[i % 3], (None, 2.0)[i // 2 % 2]
        yield Program(
            name=f"group of {i + 1}, head dim {C}, {kv_dtype}",
            dtype=dtype,
            kv_dtype=kv_dtype,
            scales=scales,
            heads=(K * (i + 1), K, C),
            block_size=(16, 1, 32, 8, 48)[i % 5],
            window=window,
            soft_cap=soft_cap,
            has_sinks=i % 4 == 1,
        )


MORE_PROGRAMS = tuple(_wide_sweep())


def edge_rows(S: int) -> dict[str, Rows]:
    """Rows for a program of the default sizes, around the edges of blocks and of tiles."""

    def rows(decode: Sequence[int], prefill: Rows) -> Rows:
        return tuple((length, 1) for length in decode) + tuple(prefill)

    return {
        "nothing": rows([0] * 4, [(0, 0), (0, 3), (0, 0), (0, 1)]),
        "ones": rows([1, 0, 1, 2], [(1, 1), (0, 0), (2, 1), (2, 2)]),
        "block edges": rows(
            [max(S - 1, 0), S, S + 1, 2 * S],
            [(2 * S, min(S, 20)), (S + 1, 1), (3 * S, min(3 * S, 31)), (2 * S + 1, 2)],
        ),
        "tiles of keys": rows([63, 64, 65, 128], [(127, 10), (128, 16), (129, 17), (256, 1)]),
        "tiles of queries": rows([15, 16, 17, 33], [(16, 16), (15, 15), (17, 17), (50, 8)]),
        "long": rows([2000, 1999, 3, 0], [(1, 1), (0, 0), (64, 1), (2, 1)]),
        "long prompts": rows([0, 1, 0, 32], [(2000, 31), (1025, 20), (640, 9), (0, 0)]),
        "one chunk": rows([0, 777, 0, 0], [(0, 0), (60, 60), (0, 0), (0, 0)]),
    }


def drawn_rows(program: Program, rng: np.random.Generator) -> Rows:
    """Rows of lengths from none to the longest, short ones more often, that fit the program."""
    R = program.num_decode_rows
    left, free = MAX_TOTAL, program.num_tokens - R
    rows = []
    for b in range(program.num_rows):
        length = int(min(np.exp(rng.uniform(0, np.log(MAX_CONTEXT + 1))) - 1, left, MAX_CONTEXT))
        num_new = 1
        if b >= R:
            num_new = int(rng.integers(0, min(free, length) + 1))
            free -= num_new
        left -= length
        rows.append((length, num_new))
    return tuple(rows)


def named_cases(programs: Sequence[Program] = PROGRAMS, *, num_drawn: int = 11) -> Iterator[Case]:
    """All cases of the programs, those of a program one after the other: the fixed ones, and
    `num_drawn` more."""
    for place, program in enumerate(programs):
        fixed = edge_rows(program.block_size).items()
        for seed, (what, rows) in enumerate(fixed):
            yield Case(f"{program.name}: {what}", program, rows, seed)
        for seed in range(num_drawn):
            rows = drawn_rows(program, np.random.default_rng([place, seed]))
            yield Case(f"{program.name}: drawn {seed}", program, rows, seed)


# --- arrays ---


def draw(case: Case) -> Inputs:
    """The arrays of a case."""
    program, rng = case.program, np.random.default_rng(case.seed)
    H, K, C = program.heads
    S = program.block_size
    table, far_table, num_blocks = _lay_out(program, case.rows, rng)
    slots = [
        (table[b, position // S], position % S)
        for b, (length, _) in enumerate(case.rows)
        for position in [np.arange(length)]
    ]
    at = tuple(np.concatenate(x) for x in zip(*slots, strict=True))
    k, v = (_pool(program, (num_blocks, S, K, C), at, rng) for _ in range(2))
    num_new = [n for _, n in case.rows]
    return Inputs(
        q=rng.normal(size=(program.num_tokens, H, C)).astype(jnp.dtype(program.dtype)),
        k=k[0],
        v=v[0],
        k_scale=k[1],
        v_scale=v[1],
        block_table=_left_behind(program, case.rows, table),
        far_table=_left_behind(program, case.rows, far_table),
        context_lens=np.array([length for length, _ in case.rows], np.int32),
        query_start_loc=np.cumsum([0, *num_new], dtype=np.int32),
        sinks=np.linspace(-3, 3, H, dtype=np.float32) if program.has_sinks else None,
    )


def _lay_out(
    program: Program, rows: Rows, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, int]:
    """Blocks for the rows, in any order. The first two and the last are nobody's: the last is what
    a block that does not exist becomes where ids are clamped."""
    S, R = program.block_size, program.num_decode_rows
    assert all(n == 1 for _, n in rows[:R])
    assert all(n <= length for length, n in rows[R:] if length)
    assert len(rows) == program.num_rows
    assert sum(n for _, n in rows) <= program.num_tokens
    held = [-(-length // S) for length, _ in rows]
    width = program.table_width or -(-MAX_CONTEXT // S)
    num_blocks = program.num_blocks or -(-MAX_TOTAL // S) + len(rows) + 3
    free = iter(2 + rng.permutation(num_blocks - 3))
    table = rng.integers(0, 2, (len(rows), width)).astype(np.int32)
    far_table = np.full_like(table, NOWHERE)
    for b, num in enumerate(held):
        table[b, :num] = far_table[b, :num] = [next(free) for _ in range(num)]
    return table, far_table, num_blocks


def _left_behind(program: Program, rows: Rows, table: np.ndarray) -> np.ndarray:
    """The table without the blocks that have left every window of their row: the null block."""
    if program.window is None:
        return table
    table = table.copy()
    for b, (length, num_new) in enumerate(rows):
        first = max(length - max(num_new, 1) - program.window + 1, 0)
        table[b, : first // program.block_size] = 0
    return table


def _pool(
    program: Program, shape: tuple[int, ...], at: tuple[Any, ...], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray | None]:
    """A pool with random numbers in the places `at` and the worst elsewhere, and its scales."""
    dtype = program.stored
    num, (K, C) = len(at[0]), shape[2:]
    numbers = rng.normal(size=(num, K, C))
    if dtype not in LARGEST:
        pool = np.full(shape, np.nan, jnp.dtype(dtype))
        pool[at] = numbers
        return pool, None
    peak = 4.0 if program.scales == "tensor" else np.abs(numbers).max(axis=-1)
    scale, kept = None, 1.0
    if program.scales == "tensor":
        scale = kept = np.float32(peak / LARGEST[dtype])
    elif program.scales == "token_head":
        scale = np.full(shape[:3], np.nan, np.float32)
        scale[at] = kept = (peak / LARGEST[dtype]).astype(np.float32)
        kept = kept[..., None]
    elif dtype == "int8":
        kept = 0.5  # so that there are a few whole numbers
    pool = np.full(shape, 0x7F, np.uint8)  # NaN in either float8, and the largest int8
    pool[at] = _bits(numbers / kept, dtype)
    return (pool.view(np.int8) if dtype == "int8" else pool), scale


def _bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest numbers of 8 bits."""
    x = np.clip(x, -LARGEST[dtype], LARGEST[dtype])
    if dtype == "int8":
        return np.round(x).astype(np.int8).view(np.uint8)
    return x.astype(np.float32).astype(getattr(ml_dtypes, dtype)).view(np.uint8)


def numbers(pool: np.ndarray, dtype: str, scale: np.ndarray | None) -> np.ndarray:
    """What a pool stands for, float64."""
    if dtype.startswith("float8"):
        pool = pool.view(getattr(ml_dtypes, dtype))
    pool = pool.astype(np.float64)
    if scale is None:
        return pool
    return pool * (scale if scale.ndim == 0 else scale[..., None])


# --- runs and judgements ---


def layer_kv(program: Program, inputs: Inputs, *, is_cpu: bool, implementation: str) -> LayerKV:
    """The pools as the engine holds them."""
    k, v = inputs.k, inputs.v
    if is_cpu and implementation != "pallas" and k.dtype in (jnp.bfloat16, jnp.float16):
        k, v = k.view(np.uint16), v.view(np.uint16)
    scales = (None if x is None else jnp.asarray(x) for x in (inputs.k_scale, inputs.v_scale))
    pools = jnp.asarray(k), jnp.asarray(v)
    return LayerKV(*pools, program.stored, *scales, implementation=implementation)


_attend = jax.jit(
    paged_attention,
    static_argnames=(
        *("num_decode_rows", "scale", "window", "soft_cap"),
        *("deterministic", "implementation"),
    ),
)


def run(
    program: Program,
    inputs: Inputs,
    *,
    implementation: str,
    deterministic: bool = False,
    is_careful: bool = False,
) -> np.ndarray:
    """What an implementation gives. is_careful: it follows a table no further than a row goes."""
    kv = layer_kv(
        program,
        inputs,
        is_cpu=jax.default_backend() == "cpu",
        implementation=implementation,
    )
    out = _attend(
        jnp.asarray(inputs.q),
        kv,
        block_table=inputs.far_table if is_careful else inputs.block_table,
        context_lens=inputs.context_lens,
        query_start_loc=inputs.query_start_loc,
        num_decode_rows=program.num_decode_rows,
        sinks=inputs.sinks,
        deterministic=deterministic,
        implementation=implementation,
        **program.rule,
    )
    assert out.dtype == program.dtype
    return np.asarray(out)


def expected(program: Program, inputs: Inputs) -> np.ndarray:
    """The oracle's, float64."""
    return oracle.paged_attention(
        inputs.q.astype(np.float64),
        numbers(inputs.k, program.stored, inputs.k_scale),
        numbers(inputs.v, program.stored, inputs.v_scale),
        inputs.block_table,
        inputs.context_lens,
        inputs.query_start_loc,
        program.num_decode_rows,
        sinks=inputs.sinks,
        **program.rule,
    )


def check(program: Program, wanted: np.ndarray, got: np.ndarray, name: str = "") -> None:
    """Raises AssertionError, with the name and the worst numbers, if a result is not `expected`."""
    got = np.asarray(got, np.float64)
    np.testing.assert_allclose(got, wanted, **program.tolerance, err_msg=name)
