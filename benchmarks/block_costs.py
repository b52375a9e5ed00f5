"""Times what paging costs beside the model: take, match, publish, fork against a decode window.

    python -m benchmarks.block_costs [--rounds 20] [--windows 3]

The block pool's functions run compiled, with N blocks, ROWS rows and room for P tokens each; their
KV pages are tiny, since only copies on write touch them. Beside them stands one window of J decode
steps of a model shaped as Llama 3.2 1B in bfloat16. Prints a Markdown table and one JSON line.
"""

import argparse
import functools as ft
import itertools
import json
import sys
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import functional as F
from jpaged.bench.machine import LoadClock, num_cpus
from jpaged.core.batch import make_batch
from jpaged.core.block_pool import publish, take_blocks
from jpaged.core.prefix_cache import (
    hash_root,
    hash_tokens,
    match_prefix,
    prefix_block_hashes,
    seal_blocks,
)
from jpaged.core.rows import reserve, share_rows
from jpaged.core.state import init_state
from jpaged.core.step import decode_window
from jpaged.models.forward import init_params, make_forward
from jpaged.models.prepare import prepare
from jpaged.ops.kv_cache import init_layer_kv

S, J, ROWS = 16, 8, 32
NUM_ADMISSIONS = 8  # the engine seats sequences by eights, padded
NUM_BLOCKS = (1024, 4096, 16384, 65536)
PROMPT_LENS = (2048, 16384, 131072)
WINDOW_ROWS = {2048: 2, 16384: 2, 131072: 1}  # few: the cheaper the window, the harder the test
IS_CPU = jax.default_backend() == "cpu"
RNG = np.random.default_rng(0)
CONFIG = F.ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
)


def median_ms(call, rounds, prepare_round=lambda: (), clock=time.perf_counter):
    """Median milliseconds of `call(*prepare_round())`; a first call compiles and is not timed."""
    times = []
    for _ in range(rounds + 1):
        args = jax.block_until_ready(prepare_round())
        start = clock()
        jax.block_until_ready(call(*args))
        times.append(clock() - start)
    return float(np.median(times[1:])) * 1e3


def processor_clock():
    """Seconds of this process's work, spread evenly over the processors of a CPU."""
    return time.process_time() / num_cpus() if IS_CPU else time.perf_counter()


# --- the functions of the core ---


def half_full_state(N, P):
    """Rows that hold half of the blocks, each about to fill its last one; all blocks are hashed."""
    state = init_state(
        (init_layer_kv(N, S, 1, 1, "float32", True),),
        num_rows=ROWS,
        max_blocks_per_row=P // S,
        hash_key=jnp.arange(4, dtype=jnp.uint32),
    )
    held = min((N - 1) // 2 // ROWS, P // S - 1)
    table, ref_count = np.zeros((ROWS + 1, P // S), np.int32), np.zeros(N, np.int32)
    table[1:, :held] = 1 + RNG.permutation(N - 1)[: ROWS * held].reshape(ROWS, held)
    ref_count[table[1:, :held]], ref_count[0] = 1, 1
    context_len = np.where(np.arange(ROWS + 1) > 0, held * S - J // 2, 0)
    block_hash = RNG.integers(0, 2**32, (N, 4), dtype=np.uint32)
    block_hash[0] = 0
    return replace(
        state,
        rows=replace(
            state.rows,
            block_table=jnp.asarray(table),
            num_blocks=jnp.where(jnp.arange(ROWS + 1) > 0, held, 0),
            context_len=jnp.asarray(context_len, jnp.int32),
            num_tokens=jnp.asarray(context_len + (context_len > 0), jnp.int32),
            active=jnp.arange(ROWS + 1) > 0,
        ),
        pool=replace(
            state.pool,
            ref_count=jnp.asarray(ref_count),
            block_hash=jnp.asarray(block_hash),
            last_used=jnp.asarray(RNG.permutation(N), jnp.int32),
            clock=jnp.int32(N),
        ),
    )


def hash_prompts(hash_key, token_ids):
    """Keys of the full blocks of prompts, as `admit` computes them."""
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1], dtype=jnp.int32), token_ids.shape)
    root = hash_root(hash_key, jnp.zeros((len(token_ids), 4), jnp.uint32), jnp.uint32(0))
    token_hash = hash_tokens(hash_key, token_ids, positions)
    return prefix_block_hashes(token_hash, root, block_size=S)[0]


def seal_step(pool, rows, row_ids, hash_key):
    """What one decode step publishes."""
    ones = jnp.ones_like(row_ids)
    batch = make_batch(rows, row_ids, ones, num_tokens=ROWS, num_decode_rows=ROWS)
    return seal_blocks(pool, rows, row_ids, batch, hash_key, jnp.ones(ROWS, bool))


def core_costs(N, P, rounds):
    """Milliseconds of each function, by name."""
    state = half_full_state(N, P)
    row_ids = jnp.arange(1, ROWS + 1, dtype=jnp.int32)

    def fresh(*parts):
        return lambda: jax.tree.map(jnp.copy, parts)

    def measure(function, parts, *args, **statics):
        program = jax.jit(ft.partial(function, **statics), donate_argnums=tuple(range(len(parts))))
        return median_ms(lambda *fresh: program(*fresh, *args), rounds, fresh(*parts))

    token_ids = jnp.asarray(RNG.integers(0, 128256, (NUM_ADMISSIONS, P)), jnp.int32)
    hashes = jax.jit(hash_prompts)(state.hash_key, token_ids)
    num_known = min(P // S, N - 1)
    known = publish(state.pool, jnp.arange(1, num_known + 1), hashes[0, :num_known])
    num_full = jnp.full(NUM_ADMISSIONS, (P - 1) // S, jnp.int32)
    num_taken, width = jnp.int32(ROWS), ROWS * J // S + 2 * ROWS
    return {
        "take": measure(take_blocks, (state.pool,), num_taken, width=width),
        "hash": measure(hash_prompts, (), state.hash_key, token_ids),
        "match": measure(match_prefix, (), known, hashes, num_full),
        "publish": measure(publish, (state.pool,), *publish_arguments(N)),
        "seal": measure(seal_step, (state.pool, state.rows), row_ids, state.hash_key),
        "fork": measure(
            lambda rows, pool, *pairs: share_rows(rows, pool, *pairs),
            (state.rows, state.pool),
            jnp.roll(row_ids, 1),
            row_ids,
        ),
        "reserve": measure(
            reserve, (state,), row_ids, jnp.full(ROWS, J, jnp.int32), max_new=ROWS * J
        ),
    }


def publish_arguments(N):
    """Blocks and hashes of a step in which every row fills one."""
    ids = 1 + RNG.permutation(N - 1)[:ROWS]
    hashes = RNG.integers(0, 2**32, (ROWS, 4), dtype=np.uint32)
    return jnp.asarray(ids, jnp.int32), jnp.asarray(hashes)


# --- the window they stand beside ---


def serving_params():
    """Parameters of the right shapes; their values cost nothing and matter to nobody."""
    shapes = jax.eval_shape(
        lambda: prepare(init_params(CONFIG, jax.random.key(0), "bfloat16"), CONFIG, "bfloat16")
    )
    return jax.tree.map(lambda x: jnp.full(x.shape, 0.01).astype(x.dtype), shapes)


def window_ms(params, P, rounds):
    """Milliseconds of a window of J steps of a few rows near the end of P tokens.

    On a CPU it is all processors' time divided by their number: others on the machine lengthen it
    less than the wall's.
    """
    B = WINDOW_ROWS[P]
    num_rows = max(B, 2)  # a CPU multiplies one row alone slowly: the other is the null row
    state = F.init_state(
        CONFIG, num_rows=B, max_model_len=P, key=jax.random.key(0), dtype="bfloat16"
    )
    M, is_row = P // S, jnp.arange(B + 1) > 0
    rows = replace(
        state.rows,
        block_table=jnp.zeros((B + 1, M), jnp.int32)
        .at[1:]
        .set(jnp.arange(1, B * M + 1, dtype=jnp.int32).reshape(B, M)),
        num_blocks=jnp.where(is_row, M, 0),
        prompt_len=jnp.where(is_row, P - 2 * J, 0),
    )
    box = [
        replace(
            state,
            rows=rows,
            pool=replace(state.pool, ref_count=jnp.ones_like(state.pool.ref_count)),
            sampling=replace(state.sampling, max_len=jnp.full(B + 1, P, jnp.int32)),
        )
    ]
    del state, rows
    row_ids = jnp.asarray([*range(1, B + 1), 0][:num_rows], jnp.int32)
    window = jax.jit(
        ft.partial(decode_window, forward=make_forward(CONFIG), num_steps=J), donate_argnums=1
    )

    def start_again():
        box[0] = replace(
            box[0],
            rows=replace(
                box[0].rows,
                num_tokens=jnp.where(is_row, P - 2 * J + 1, 0),
                context_len=jnp.where(is_row, P - 2 * J, 0),
                active=jnp.copy(is_row),
            ),
        )
        return ()

    def call():
        box[0], output = window(params, box[0], row_ids)
        return output

    time_ms = median_ms(call, rounds, start_again, processor_clock)
    assert (np.asarray(box[0].rows.context_len)[1:] == P - J).all(), "the window did not run"
    return time_ms


# --- the table ---


def share_of(costs, window, num_forks):
    """What a window with one admission and some forks of all rows pays, as a share of it.

    `reserve` takes, and seals publish. The engine hashes and matches twice: it looks a prompt up
    before it admits it.
    """
    per_window = costs["reserve"] + J * costs["seal"] + num_forks * costs["fork"]
    return (per_window + 2 * (costs["hash"] + costs["match"])) / window


def measure_windows(rounds):
    """Milliseconds of a window, by the context."""
    params, windows = serving_params(), {}
    for P in PROMPT_LENS:
        windows[P] = window_ms(params, P, rounds)
        print(f"window at {P}: {windows[P]:.0f} ms", file=sys.stderr, flush=True)
    return windows


def print_table(windows, rounds):
    """A line for each size. Returns the shares, with one fork in a window and with J."""
    names = ("take", "reserve", "publish", "seal", "fork", "hash", "match")
    print(f"| context P | blocks N | {' | '.join(names)} | window | share |")
    print("|---:" * (len(names) + 4) + "|")
    shares, beam_shares = {}, {}
    for P, N in itertools.product(PROMPT_LENS, NUM_BLOCKS):
        costs = core_costs(N, P, rounds)
        shares[P, N], beam_shares[P, N] = (share_of(costs, windows[P], n) for n in (1, J))
        cells = " | ".join(f"{costs[name]:.2f}" for name in names)
        print(f"| {P:,} | {N:,} | {cells} | {windows[P]:,.0f} | {shares[P, N]:.2%} |", flush=True)
    return shares, beam_shares


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--windows", type=int, default=3)
    args = parser.parse_args()
    with LoadClock() as clock:
        shares, beam_shares = print_table(measure_windows(args.windows), args.rounds)
    worst = max(shares, key=lambda size: shares[size])
    result = {
        "worst_share": round(shares[worst], 5),
        "at_context": worst[0],
        "at_blocks": worst[1],
        "worst_share_beams": round(max(beam_shares.values()), 5),
        "num_decode_steps": J,
        "rows": ROWS,
        "seconds": round(clock.seconds),
        "other_share": clock.other_share and round(clock.other_share, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
