"""Runs sequences through a `Forward` over a pool of blocks, batch by batch, made by hand."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.core.batch import Batch, Forward, KVCache
from jpaged.model_config import ModelConfig
from jpaged.ops.kv_cache import init_layer_kv

BLOCK_SIZE = 4
MAX_BLOCKS = 12


def empty_cache(config: ModelConfig, num_rows: int, dtype: str = "float32") -> KVCache:
    num_blocks = 1 + num_rows * MAX_BLOCKS
    one = init_layer_kv(
        num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim, dtype, platform_is_cpu=True
    )
    return (one,) * config.num_layers


def make_batch(
    sequences: Sequence[np.ndarray],
    context_lens: Sequence[int],
    num_new: Sequence[int],
    prompt_lens: Sequence[int],
    *,
    num_tokens: int,
    num_decode_rows: int,
) -> Batch:
    """Row b takes its next `num_new[b]` tokens; its blocks lie backwards in the pool."""
    rows = np.repeat(np.arange(len(sequences)), num_new)
    positions = np.concatenate(
        [np.arange(c, c + n) for c, n in zip(context_lens, num_new, strict=True)]
    )
    table = 1 + np.arange(len(sequences) * MAX_BLOCKS)[::-1].reshape(len(sequences), MAX_BLOCKS)
    slots = table[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    token_ids = [sequences[row][position] for row, position in zip(rows, positions, strict=True)]

    def packed(values: object, fill: int = 0) -> jax.Array:
        array = np.asarray(values, np.int32)
        return jnp.asarray(np.pad(array, (0, num_tokens - len(array)), constant_values=fill))

    return Batch(
        token_ids=packed(token_ids),
        positions=packed(positions),
        token_rows=packed(rows, fill=len(sequences) - 1),
        slot_mapping=packed(slots),
        context_lens=jnp.asarray(np.add(context_lens, num_new), jnp.int32),
        prompt_lens=jnp.asarray(prompt_lens, jnp.int32),
        block_table=jnp.asarray(table, jnp.int32),
        query_start_loc=jnp.asarray(np.concatenate([[0], np.cumsum(num_new)]), jnp.int32),
        num_decode_rows=num_decode_rows,
    )


def run_paged(
    forward: Forward,
    params: object,
    cache: KVCache,
    sequences: Sequence[np.ndarray],
    prompt_lens: Sequence[int],
    *,
    chunk: int,
) -> list[np.ndarray]:
    """Logits after every token: prompts in chunks, then one token a step, rows side by side.

    All sequences have as many tokens after their prompts.
    """
    hidden_of, logits_of = jax.jit(forward.hidden), jax.jit(forward.logits)
    done = [0] * len(sequences)
    logits: list[list[np.ndarray]] = [[] for _ in sequences]
    while any(d < len(sequence) for d, sequence in zip(done, sequences, strict=True)):
        left = [p - d for p, d in zip(prompt_lens, done, strict=True)]
        decoding = max(left) <= 0
        num_new = [1] * len(done) if decoding else [min(chunk, max(0, n)) for n in left]
        batch = make_batch(
            sequences,
            done,
            num_new,
            prompt_lens,
            num_tokens=len(done) if decoding else chunk * len(done),
            num_decode_rows=len(done) if decoding else 0,
        )
        hidden, cache = hidden_of(params, batch, cache)
        step_logits = np.asarray(logits_of(params, hidden))
        for row, start in enumerate(np.asarray(batch.query_start_loc)[:-1]):
            logits[row] += list(step_logits[start : start + num_new[row]])
        done = [d + n for d, n in zip(done, num_new, strict=True)]
    return [np.stack(rows) for rows in logits]
