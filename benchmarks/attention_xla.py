"""Times paged attention on XLA: decode against one wide gather, prefill, and the cost of bits.

    python -m benchmarks.attention_xla [--tile-q 32] [--tile-kv 128] [--rounds 40]

Prints one JSON line per case with the median milliseconds of each form.
"""

import argparse
import functools as ft
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.ops import paged_attention as op
from jpaged.ops.kv_cache import init_layer_kv, read_blocks, write_kv

H, K, C, S, MAX_LEN = 9, 3, 64, 16, 2048
RNG = np.random.default_rng(0)


def make_case(rows, *, num_decode_rows, dtype):
    """Arguments for rows of (context_len, num_new)."""
    M, B = MAX_LEN // S, len(rows)
    N = 1 + B * M
    num_tokens = sum(n for _, n in rows)
    k, v = jnp.asarray(RNG.normal(size=(2, N * S, K, C)), dtype)
    kv = init_layer_kv(N, S, K, C, dtype, platform_is_cpu=True)
    table = jnp.asarray(1 + RNG.permutation(B * M).reshape(B, M), jnp.int32)
    starts = np.concatenate([[0], np.cumsum([n for _, n in rows])])
    return {
        "q": jnp.asarray(RNG.normal(size=(num_tokens, H, C)), dtype),
        "kv": write_kv(kv, k, v, jnp.arange(N * S)),
        "block_table": table,
        "context_lens": jnp.asarray([c for c, _ in rows], jnp.int32),
        "query_start_loc": jnp.asarray(starts, jnp.int32),
        "num_decode_rows": num_decode_rows,
    }


def wide_gather(q, kv, *, block_table, context_lens, width, **_):
    """Decode over the table sliced to `width` blocks: what a bucketed engine compiles per width."""
    B = q.shape[0]
    k, v = (x.reshape(B, -1, K, C).swapaxes(1, 2) for x in read_blocks(kv, block_table[:, :width]))
    is_visible = jnp.arange(k.shape[2])[None] < context_lens[:, None]
    v = jnp.where(is_visible[:, None, :, None], v, 0)
    dot = ft.partial(jnp.einsum, preferred_element_type=jnp.float32, precision="highest")
    scores = dot("bkgc,bkpc->bkgp", q.reshape(B, K, -1, C), k) * C**-0.5
    weights = jax.nn.softmax(jnp.where(is_visible[:, None, None], scores, -1e30))
    return dot("bkgp,bkpc->bkgc", weights.astype(v.dtype), v).astype(q.dtype).reshape(B, H, C)


def median_ms(forms, case, rounds):
    """Interleaved, so that all forms meet the same load."""
    times = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            start = time.perf_counter()
            form(**case).block_until_ready()
            times[name].append(time.perf_counter() - start)
    return {name: round(float(np.median(x[1:])) * 1e3, 2) for name, x in times.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tile-q", type=int, default=op.TILE_Q)
    parser.add_argument("--tile-kv", type=int, default=op.TILE_KV)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    op.TILE_Q, op.TILE_KV = args.tile_q, args.tile_kv

    attend = ft.partial(op.paged_attention, scale=C**-0.5, window=None, soft_cap=None)
    paged = {
        "paged": jax.jit(attend, static_argnames="num_decode_rows"),
        "deterministic": jax.jit(
            ft.partial(attend, deterministic=True), static_argnames="num_decode_rows"
        ),
    }
    gather = jax.jit(ft.partial(wide_gather, width=512 // S), static_argnames="num_decode_rows")
    decode_rows = [(int(c), 1) for c in [512, *RNG.integers(320, 513, 31)]]
    ragged = [(n, n) for n in (16, 80, 160, 220, 300, 370, 440, 512)]
    for dtype in ("float32", "bfloat16"):
        for name, rows, num_decode_rows, forms in (
            ("decode 32 rows at 320-512", decode_rows, 32, {"gather": gather} | paged),
            ("prefill 512", [(512, 512)], 0, paged),
            ("prefill 8 ragged of 16-512", ragged, 0, paged),
        ):
            case = make_case(rows, num_decode_rows=num_decode_rows, dtype=dtype)
            print(
                json.dumps({"case": name, "dtype": dtype} | median_ms(forms, case, args.rounds)),
                flush=True,
            )


if __name__ == "__main__":
    main()
