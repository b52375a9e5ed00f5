"""Log-probabilities of tokens that were given, not drawn: `prompt_logprobs`, and scoring.

Promise: no array of tokens x vocabulary is ever made; logits exist for a tile of tokens at a time.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jpaged.core.batch import Batch, Forward
from jpaged.core.state import Rows
from jpaged.core.vocabulary import likeliest_or_all, normalised, rank_of
from jpaged.typing import Array, Bool, Float, Int, Params

SCORE_TOKENS = 32  # tokens whose logits are made together


@struct.dataclass
class PromptScores:
    """Of the token behind each of the step's T tokens; zeros where nothing was asked."""

    logprobs: Float[Array, " T"]
    ranks: Int[Array, " T"]  # 1 + the number of likelier ids
    top_ids: Int[Array, "T K"]  # the likeliest first; all of them in order of ids
    top_logprobs: Float[Array, "T K"]


def score_prompts(
    params: Params,
    rows: Rows,
    row_ids: Int[Array, " B"],
    score_from: Int[Array, " B"],
    batch: Batch,
    hidden: Float[Array, "T D"],
    *,
    forward: Forward,
    num_top: int,
) -> PromptScores:
    """What the model thought of prompt tokens, from raw logits.

    score_from: the first position of each row that is scored, at least 1; positions up to the
    prompt's end are. hidden: of the step's tokens; that of position i scores the token at i + 1.
    num_top: K, at most V (static); all V come in the order of ids.
    """
    T, P = batch.token_ids.shape[0], rows.token_ids.shape[1]
    position, row_id = batch.positions + 1, row_ids[batch.token_rows]
    wants = (batch.slot_mapping != 0) & (position >= score_from[batch.token_rows])
    wants &= position < rows.prompt_len[row_id]
    tokens = rows.token_ids[row_id, jnp.minimum(position, P - 1)]

    def score(tile: tuple[Float[Array, "t D"], Int[Array, " t"], Bool[Array, " t"]]):
        hidden, tokens, wants = tile
        return lax.cond(
            jnp.any(wants),
            lambda: _score(forward.logits(params, hidden), tokens, wants, num_top),
            lambda: _nothing(tokens.shape[0], num_top),
        )

    padding = -T % SCORE_TOKENS
    tiles = jax.tree.map(lambda x: _tiles(x, padding), (hidden, tokens, wants))
    scores = lax.map(score, tiles)
    return jax.tree.map(lambda x: x.reshape(T + padding, *x.shape[2:])[:T], scores)


def _tiles(x: Array, padding: int) -> Array:
    x = jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)))
    return x.reshape(-1, SCORE_TOKENS, *x.shape[1:])


def _score(
    logits: Float[Array, "t V"], tokens: Int[Array, " t"], wants: Bool[Array, " t"], num_top: int
) -> PromptScores:
    top, top_ids = likeliest_or_all(logits, num_top)
    own = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    logprobs = normalised(logits, jnp.concatenate([own, top], axis=1))
    scores = PromptScores(logprobs[:, 0], rank_of(logits, tokens), top_ids, logprobs[:, 1:])
    return jax.tree.map(
        lambda x: jnp.where(wants.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x)), scores
    )


def _nothing(num_tokens: int, num_top: int) -> PromptScores:
    ids = jnp.zeros((num_tokens, num_top), jnp.int32)
    numbers = jnp.zeros(num_tokens, jnp.float32)
    return PromptScores(numbers, numbers.astype(jnp.int32), ids, ids.astype(jnp.float32))
