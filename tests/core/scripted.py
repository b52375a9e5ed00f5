"""Models of a few lines whose next token is known, for driving the core and the engine.

`counting_forward` keeps (token, position) in its KV pages, and its next token is a number made of
every (token, position) it finds through the block table. A slot that is missing, stale, or written
by a neighbour gives another token. `windowed_forward` does so with the last few tokens alone.
"""

import functools as ft

import jax.numpy as jnp
import numpy as np

from jpaged.core.batch import Batch, Forward, KVCache
from jpaged.ops.kv_cache import init_layer_kv, write_kv

VOCAB_SIZE = 50
MODULUS = 8191


def counting_kv(num_blocks: int, block_size: int) -> KVCache:
    return (init_layer_kv(num_blocks, block_size, 1, 2, "float32", True),)


def _hidden(params, batch: Batch, kv: KVCache, *, window: int | None = None):
    entry = jnp.stack([batch.token_ids, batch.positions], axis=-1).astype(jnp.float32)[:, None]
    layer = write_kv(kv[0], entry, entry, batch.slot_mapping)
    context = layer.k[batch.block_table].reshape(*batch.block_table.shape[:1], -1, 2)
    context = jnp.where(jnp.isnan(context), 0, context).astype(jnp.int32)[batch.token_rows]
    token, position = context[..., 0], context[..., 1]
    behind = batch.positions[:, None] - jnp.arange(token.shape[1])[None]
    is_visible = (behind >= 0) & (behind < (token.shape[1] if window is None else window))
    mixed = jnp.where(is_visible, (token * 31 + 7) * (position + 3) % MODULUS, 0)
    return (jnp.sum(mixed, axis=1) % MODULUS).astype(jnp.float32)[:, None], (layer,)


def _logits(params, hidden):
    """Spread over the vocabulary, a little sharper than flat, its peak moved by `params`."""
    token = jnp.arange(VOCAB_SIZE, dtype=jnp.int32)[None]
    number = hidden.astype(jnp.int32) + params["shift"]
    return ((number * (token * 17 + 5) + token * 13) % 101).astype(jnp.float32) / 25


def counting_params(shift: int = 0) -> dict:
    return {"shift": jnp.int32(shift)}


counting_forward = Forward(_hidden, _logits)


@ft.cache
def windowed_forward(window: int) -> Forward:
    """The counting model that sees the last `window` tokens."""
    return Forward(ft.partial(_hidden, window=window), _logits, window)


def next_logits(tokens: list[int], shift: int = 0, window: int | None = None) -> np.ndarray:
    """The counting model's logits after `tokens`, in plain Python."""
    seen = list(enumerate(tokens))[-window if window else 0 :]
    number = sum((t * 31 + 7) * (p + 3) % MODULUS for p, t in seen) % MODULUS
    number += shift
    return np.array([(number * (t * 17 + 5) + t * 13) % 101 / 25 for t in range(VOCAB_SIZE)])


def greedy_continuation(
    tokens: list[int], num_new: int, shift: int = 0, window: int | None = None
) -> list[int]:
    out = list(tokens)
    for _ in range(num_new):
        out.append(int(np.argmax(next_logits(out, shift, window).astype(np.float32))))
    return out[len(tokens) :]
