"""Where the time of a decode step goes: windows of the real program, with stages left out.

    JAX_PLATFORMS=cpu python -m benchmarks.step_profile --model HF_DIRECTORY --dtype bfloat16 \\
        --rows 2 32 64 --context 256

A stage's time is what a step takes less when it is left out: attention gives its queries back,
products repeat a number of each row, sampling takes the first id. The weights and the KV of the
others stay what they are, though what is computed means nothing. Prints a line of JSON for each
number of rows: ms of a step, the median of the windows measured.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.config import EngineConfig
from jpaged.core.state import EngineState
from jpaged.core.step import decode_window
from jpaged.engine import compiled, implementation, weights
from jpaged.engine.serving import _state_sizes, resolve_model
from jpaged.models.forward import make_forward

NUM_STEPS, BLOCK_SIZE, SPARE_STEPS = 8, 16, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--implementation", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 32, 64])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--windows", type=int, default=8)
    args = parser.parse_args()
    compiled.keep_programs(None)
    model = resolve_model(args.model)
    length = args.context + SPARE_STEPS
    asked = EngineConfig(
        dtype=args.dtype,
        implementation=args.implementation,
        quantization=args.quantization,
        max_model_len=length,
    )
    config = implementation.resolve(asked.resolved(model, "cpu"), device=jax.devices()[0])
    params = weights.load(args.model, model, config, args.dtype)
    for rows in args.rows:
        sized = replace(config, max_num_seqs=rows, max_num_batched_tokens=max(rows, 16))
        measured = {
            name: measure(params, model, sized, args, left_out)
            for name, left_out in LEFT_OUT.items()
        }
        whole = measured.pop("nothing")
        stages = {name: round(whole - ms, 2) for name, ms in measured.items()}
        rest = round(whole - sum(stages.values()), 2)
        print(
            json.dumps(
                {"rows": rows, "context": args.context, "step_ms": round(whole, 2)}
                | stages
                | {"the rest": rest, "dtype": args.dtype, "implementation": config.implementation}
            ),
            flush=True,
        )


def no_attention() -> Any:
    return mock.patch("jpaged.models.attend.paged_attention", lambda q, *_, **__: q)


def no_products() -> Any:
    def repeat(x: Any, *_: Any, num_out: int, dtype: Any, **__: Any) -> Any:
        return jnp.broadcast_to(x[:, :1], (x.shape[0], num_out)).astype(dtype)

    return mock.patch("jpaged.native.matmul.multiply", repeat)


def no_heads() -> Any:
    def skip(kv: Any, heads: Any, *_: Any, **__: Any) -> Any:
        return heads.normalized()[0], kv

    return mock.patch("jpaged.models.attend.take_heads", skip)


LEFT_OUT: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "products": no_products,
    "attention": no_attention,
    "rope and KV write": no_heads,
}


def measure(
    params: Any, model: Any, config: EngineConfig, args: argparse.Namespace, left_out: Any
) -> float:
    """Milliseconds of a step, the median of some windows."""
    make_forward.cache_clear()  # what it traced before holds the stages of before
    forward = make_forward(model, implementation=config.implementation)
    run = jax.jit(decode_window, donate_argnums=1, static_argnames=("forward", "num_steps"))
    assert config.max_num_seqs is not None
    row_ids = jnp.arange(1, config.max_num_seqs + 1, dtype=jnp.int32)
    state = seated(model, config, args.dtype, args.context)
    seconds = []
    with left_out():
        for _ in range(args.windows + 1):
            started = time.perf_counter()
            state, output = run(params, state, row_ids, forward=forward, num_steps=NUM_STEPS)
            jax.block_until_ready((state, output))
            seconds.append(time.perf_counter() - started)
    assert int(np.sum(output.granted)) == NUM_STEPS * config.max_num_seqs, "rows did not run"
    return statistics.median(seconds[1:]) / NUM_STEPS * 1e3


def seated(model: Any, config: EngineConfig, dtype: str, context: int) -> EngineState:
    """Rows with a context of zeros, which lack the KV of one token and never end."""
    R = config.max_num_seqs
    assert R is not None
    assert config.max_model_len is not None
    blocks_per_row = -(-config.max_model_len // BLOCK_SIZE)
    num_blocks = R * blocks_per_row + 1
    sizes = _state_sizes(config, model, dtype, num_blocks)
    state = compiled.empty_state(np.zeros(4, np.uint32), **sizes)
    held = -(-(context + 1) // BLOCK_SIZE)
    table = np.zeros(state.rows.block_table.shape, np.int32)
    table[1:, :held] = 1 + np.arange(R * held).reshape(R, held)
    ref_count = np.zeros(num_blocks, np.int32)
    ref_count[: 1 + R * held] = 1

    def each(value: int, null: int = 0) -> Any:
        return jnp.asarray(np.concatenate([[null], np.full(R, value)]), jnp.int32)

    rows = replace(
        state.rows,
        num_tokens=each(context + 1),
        context_len=each(context),
        prompt_len=each(context),
        block_table=jnp.asarray(table),
        num_blocks=each(held),
        active=jnp.asarray(np.arange(R + 1) > 0),
    )
    sampling = replace(state.sampling, max_len=each(config.max_model_len), eos_id=each(-1, null=-1))
    pool = replace(state.pool, ref_count=jnp.asarray(ref_count))
    return replace(state, rows=rows, pool=pool, sampling=sampling)


if __name__ == "__main__":
    main()
