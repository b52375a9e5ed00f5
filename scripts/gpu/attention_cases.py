"""Attention to be timed: what is asked, what it must read and compute, and arrays for it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.checks import STORAGE

BLOCK_SIZE = 16
_QUIET_BITS = {"float8_e4m3fn": 0xB7, "float8_e5m2": 0xBF}  # keep numbers of magnitude 2 at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """rows: (context_len, num_new) of each; one new token each is a decode.

    scales: of 8-bit caches, "one" for all or "each" token and head.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    kv_dtype: str = "bfloat16"
    scales: str | None = None
    window: int | None = None

    @property
    def is_decode(self) -> bool:
        """Whether every row has one query."""
        return all(new == 1 for _, new in self.rows)

    @property
    def is_plain(self) -> bool:
        """Whether dense attention of one shape can do it: others' kernels."""
        return len(set(self.rows)) == 1 and self.kv_dtype == "bfloat16" and self.window is None

    @property
    def is_fresh(self) -> bool:
        """Whether queries are all that there is."""
        return all(length == new for length, new in self.rows)

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(new for _, new in self.rows)

    @property
    def num_bytes(self) -> int:
        """Of visible keys and values with their scales, of queries and results: each once."""
        per_token = self.head_dim * jnp.dtype(STORAGE[self.kv_dtype]).itemsize
        per_token += 4 if self.scales == "each" else 0
        visible = sum(min(length, (self.window or length) + new - 1) for length, new in self.rows)
        return 2 * visible * self.num_kv_heads * per_token + 2 * self._q_size * 2

    @property
    def num_flops(self) -> int:
        """Of both products, over the pairs of a query and a position that it sees."""
        pairs = 0
        for length, new in self.rows:
            seen = np.arange(length - new + 1, length + 1)
            pairs += int(np.minimum(seen, self.window or length).sum())
        return 4 * self.num_heads * self.head_dim * pairs

    @property
    def _q_size(self) -> int:
        return self.num_tokens * self.num_heads * self.head_dim

    def told(self) -> dict[str, Any]:
        """What identifies it in a table."""
        heads = [self.num_heads, self.num_kv_heads, self.head_dim]
        return {
            "case": self.name,
            "heads": heads,
            "kv_dtype": self.kv_dtype,
            "rows": len(self.rows),
        }


class Arrays(NamedTuple):
    """What a paged kernel takes. Rows lie in blocks of their own, in random order."""

    q: jax.Array  # bf16[T H C]
    k: jax.Array  # [N S K C]
    v: jax.Array
    block_table: jax.Array  # i32[B M]
    context_lens: jax.Array  # i32[B]
    query_start_loc: jax.Array  # i32[B+1]
    k_scale: jax.Array | None
    v_scale: jax.Array | None


def make_arrays(case: Case) -> Arrays:
    """Random arrays for a case."""
    rng, S = np.random.default_rng(0), BLOCK_SIZE
    widths = [-(-length // S) for length, _ in case.rows]
    N = 1 + sum(widths)
    block_ids = 1 + rng.permutation(N - 1)
    table = np.zeros((len(widths), max(widths)), np.int32)
    for row, (start, width) in enumerate(zip(np.cumsum([0, *widths[:-1]]), widths, strict=True)):
        table[row, :width] = block_ids[start : start + width]
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (N, S, case.num_kv_heads, case.head_dim)
    scale = {None: None, "one": jnp.float32(0.01), "each": jnp.full(shape[:3], 0.01)}[case.scales]
    return Arrays(
        q=jax.random.normal(
            keys[0], (case.num_tokens, case.num_heads, case.head_dim), jnp.bfloat16
        ),
        k=_numbers(keys[1], shape, case.kv_dtype),
        v=_numbers(keys[2], shape, case.kv_dtype),
        block_table=jnp.asarray(table),
        context_lens=jnp.asarray([length for length, _ in case.rows], jnp.int32),
        query_start_loc=jnp.asarray(
            np.cumsum([0, *(new for _, new in case.rows)]).astype(np.int32)
        ),
        k_scale=scale,
        v_scale=scale,
    )


def _numbers(key: jax.Array, shape: tuple[int, ...], kv_dtype: str) -> jax.Array:
    storage = jnp.dtype(STORAGE[kv_dtype])
    if storage.itemsize > 1:
        return jax.random.normal(key, shape, storage)
    bits = jax.random.bits(key, shape, jnp.uint8) & jnp.uint8(_QUIET_BITS.get(kv_dtype, 0xFF))
    return bits if storage == jnp.uint8 else jax.lax.bitcast_convert_type(bits, storage)


def dense(case: Case, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Keys and values of a plain case row by row, `[B P K C]`, as kernels without pages take."""
    P = case.rows[0][0]

    def gather(pool: jax.Array) -> jax.Array:
        blocks = pool[arrays.block_table]
        return blocks.reshape(len(case.rows), -1, *pool.shape[2:])[:, :P]

    return gather(arrays.k), gather(arrays.v)


# --- the tables ---

_FP8 = {"kv_dtype": "float8_e4m3fn", "scales": "one"}
DECODE = (
    Case(name="64 x 4,096", rows=((4096, 1),) * 64),
    Case(name="64 x 4,096, e4m3", rows=((4096, 1),) * 64, **_FP8),
    Case(name="64 x 4,096, dim 64", rows=((4096, 1),) * 64, head_dim=64),
    Case(name="16 x 8,192", rows=((8192, 1),) * 16),
    Case(name="256 x 1,024", rows=((1024, 1),) * 256),
    Case(name="1 x 131,072", rows=((131072, 1),)),
    Case(name="64 x 64 to 4,096", rows=tuple((64 * i, 1) for i in range(1, 65))),
    Case(name="64 x 4,096, int8 by head", rows=((4096, 1),) * 64, kv_dtype="int8", scales="each"),
    Case(name="64 x 4,096, window 1,024", rows=((4096, 1),) * 64, window=1024),
    Case(name="64 x 4,096, group of 16", rows=((4096, 1),) * 64, num_kv_heads=2),
    Case(name="64 x 512", rows=((512, 1),) * 64),
    Case(name="1 x 4,096", rows=((4096, 1),)),
)
PREFILL = (
    Case(name="1 x 8,192", rows=((8192, 8192),)),
    Case(name="8 x 1,024", rows=((1024, 1024),) * 8),
    Case(name="1 x 2,048 behind 30,720", rows=((32768, 2048),)),
    Case(name="1 x 8,192, dim 64", rows=((8192, 8192),), head_dim=64),
    Case(name="1 x 8,192, e4m3", rows=((8192, 8192),), **_FP8),
    Case(name="1 x 8,192, window 1,024", rows=((8192, 8192),), window=1024),
    Case(name="16 x 16 to 1,024", rows=tuple((64 * i, 64 * i) for i in range(1, 17))),
    Case(name="64 x 4 behind 4,092", rows=((4096, 4),) * 64),
)
_TINY = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
SMOKE_DECODE = (
    Case(name="2 x 24", rows=((24, 1),) * 2, **_TINY),
    Case(name="e4m3", rows=((24, 1), (9, 1)), **_TINY, **_FP8),
)
SMOKE_PREFILL = (
    Case(name="2 x 16", rows=((16, 16),) * 2, **_TINY),
    Case(name="int8", rows=((24, 5), (9, 9)), **_TINY, kv_dtype="int8", scales="each"),
)
