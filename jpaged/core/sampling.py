"""Sampling: from a row's logits to its next token, and the decision whether the row stops.

Owns `SamplingState` and the order of operations. Knows nothing of blocks, requests or models.
Promise: a token depends on its row alone (logits, parameters, tokens, key, position), to the bit,
whatever the other rows of the step are.

    raw logits -> rules -> argmax, or: temperature -> min-p -> top-k -> top-p -> draw
    `--- raw log-probabilities              processed log-probabilities ---'
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.extend.random import threefry_2x32

from jpaged.core.logits_rules import (
    History,
    LogitsProcessor,
    LogitsRules,
    RuleSizes,
    apply_rules,
    init_rules,
    mask_raw,
)
from jpaged.core.truncation import Truncation, draw, truncated_logits
from jpaged.core.vocabulary import argmax, likeliest_or_all, normalised, rank_of
from jpaged.sampling_params import GREEDY_TEMPERATURE
from jpaged.typing import Array, Bool, Float, Int, UInt32

RUNNING, STOP_EOS, STOP_TOKEN, STOP_LENGTH = 0, 1, 2, 3
"""Why a row stops, as `finish_reasons` tells it."""

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


class Sampler(NamedTuple):
    """How a step samples; static. Neither field changes the tokens of rows that do not need it.

    has_rules: rows may have rules; without it `SamplingState.rules` is not looked at.
    num_top: the likeliest ids that are told of each row; a whole vocabulary, or more, is told in
        the order of ids. logprobs_mode: what is told of an id, vLLM's names. processors: those that
        the state was made with.
    """

    has_rules: bool = False
    num_top: int = 0
    logprobs_mode: LogprobsMode = "raw_logprobs"
    processors: tuple[LogitsProcessor, ...] = ()


PLAIN = Sampler()


@struct.dataclass
class SamplingState:
    """How each row samples and when it stops."""

    key: UInt32[Array, "R 2"]  # of the request's seed, see `seed_key`
    temperature: Float[Array, " R"]  # below GREEDY_TEMPERATURE: argmax
    top_p: Float[Array, " R"]  # 1: off
    top_k: Int[Array, " R"]  # 0: off
    min_p: Float[Array, " R"]  # 0: off
    eos_id: Int[Array, " R"]  # -1: end-of-sequence is ignored
    stop_ids: Int[Array, "R X"]  # padded with -1
    min_len: Int[Array, " R"]  # tokens, prompt included, below which no token stops the row
    max_len: Int[Array, " R"]  # tokens, prompt included, at which it stops
    want_logprobs: Bool[Array, " R"]
    rules: LogitsRules | None = None  # None: this state has no room for any


def init_sampling_state(
    num_rows: int,
    num_stop_ids: int,
    rule_sizes: RuleSizes | None = None,
    processors: tuple[LogitsProcessor, ...] = (),
) -> SamplingState:
    """Rows that sample greedily, know no stop and have no rules."""
    R = num_rows

    def full(value: float, dtype: jax.typing.DTypeLike) -> Array:
        return jnp.full(R, value, dtype)  # a buffer each: shared ones could not be donated

    return SamplingState(
        key=jnp.zeros((R, 2), jnp.uint32),
        temperature=full(0, jnp.float32),
        top_p=full(1, jnp.float32),
        top_k=full(0, jnp.int32),
        min_p=full(0, jnp.float32),
        eos_id=full(-1, jnp.int32),
        stop_ids=jnp.full((R, num_stop_ids), -1, jnp.int32),
        min_len=full(0, jnp.int32),
        max_len=full(0, jnp.int32),
        want_logprobs=full(False, jnp.bool_),
        rules=None if rule_sizes is None else init_rules(R, rule_sizes, processors),
    )


def seed_key(seed: int) -> np.ndarray:
    """The key u32[2] of a seed modulo 2**64, on the host: JAX alone would drop the upper half."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


class Told(NamedTuple):
    """What a step tells of each row's distribution, by `Sampler.logprobs_mode`. Zeros for rows that
    do not want it."""

    logprobs: Float[Array, " B"]  # of the token
    ranks: Int[Array, " B"]  # of the token: 1 + the number of likelier ids
    top_ids: Int[Array, "B K"]  # K = `Sampler.num_top`, the likeliest first
    top_logprobs: Float[Array, "B K"]
    asked_logprobs: Float[Array, "B Q"]  # of `LogitsRules.logprob_ids`; Q = 0 without rules


class Sampled(NamedTuple):
    """A token for each row that samples, 0 for the others."""

    tokens: Int[Array, " B"]
    told: Told
    has_choice: Bool[Array, " B"]  # False: the rules left no id that could be drawn


def sample(
    rows: SamplingState,
    sample_index: Int[Array, " B"],
    history: History,
    logits: Float[Array, "B V"],
    *,
    is_sampling: Bool[Array, " B"],
    sampler: Sampler = PLAIN,
) -> Sampled:
    """Chooses the next token of each row.

    rows: the parameters of these B rows. sample_index: which of its request's n samples a row is.
    history: the rows' tokens; the new ones go to position `num_tokens`. logits: float32, no NaN.
    Equal logits: argmax takes the lowest id, a threshold keeps them all. top_k = 1 is argmax.
    """
    raw, has_choice = logits, jnp.ones(logits.shape[0], jnp.bool_)
    rules = rows.rules if sampler.has_rules else None
    if rules is not None:
        raw = mask_raw(rules, logits)
        logits = apply_rules(rules, history, rows.min_len, logits, sampler.processors)
        # A NaN, which only a processor can have made, is the largest, and above nothing.
        has_choice = (jnp.max(logits, axis=1) > -jnp.inf) | ~rules.is_on
    is_random = is_sampling & (rows.temperature >= GREEDY_TEMPERATURE)
    truncation = Truncation(rows.temperature, rows.min_p, rows.top_k, rows.top_p, is_random)
    is_drawn = is_random & (rows.top_k != 1)
    best = argmax(logits)

    def drawn() -> Int[Array, " B"]:
        bits = random_bits(rows.key, sample_index, history.num_tokens)
        return jnp.where(is_drawn, draw(truncation._replace(is_on=is_drawn), bits, logits), best)

    tokens = lax.cond(jnp.any(is_drawn), drawn, lambda: best)
    tokens = jnp.where(is_sampling, tokens, 0)
    wants = is_sampling & rows.want_logprobs
    told = tell(rules, raw, logits, truncation, tokens, wants, sampler)
    return Sampled(tokens, told, has_choice)


def tell(
    rules: LogitsRules | None,
    raw: Float[Array, "B V"],
    logits: Float[Array, "B V"],
    truncation: Truncation,
    tokens: Int[Array, " B"],
    wants: Bool[Array, " B"],
    sampler: Sampler,
) -> Told:
    """What is told of the rows that want it; at no cost if there are none.

    raw: the logits before the rules. logits: those behind them.
    """
    B, V = raw.shape
    num_top = min(sampler.num_top, V)
    asked_ids = jnp.zeros((B, 0), jnp.int32) if rules is None else rules.logprob_ids

    def compute() -> Told:
        is_raw = sampler.logprobs_mode.startswith("raw")
        told = raw if is_raw else truncated_logits(truncation, logits)
        top, top_ids = likeliest_or_all(told, num_top)
        ids = jnp.concatenate([tokens[:, None], jnp.maximum(asked_ids, 0)], axis=1)
        chosen = jnp.concatenate([jnp.take_along_axis(told, ids, axis=1), top], axis=1)
        if sampler.logprobs_mode.endswith("logprobs"):
            chosen = normalised(told, chosen)
        first_top = ids.shape[1]
        found = Told(
            logprobs=chosen[:, 0],
            ranks=rank_of(told, tokens),
            top_ids=top_ids,
            top_logprobs=chosen[:, first_top:],
            asked_logprobs=chosen[:, 1:first_top],
        )
        return jax.tree.map(lambda x: _rows_where(wants, x), found)

    def nothing() -> Told:
        numbers, ids = jnp.zeros(B, jnp.float32), jnp.zeros(B, jnp.int32)
        top = jnp.zeros((B, num_top), jnp.float32)
        asked = jnp.zeros(asked_ids.shape, jnp.float32)
        return Told(numbers, ids, top.astype(jnp.int32), top, asked)

    return lax.cond(jnp.any(wants), compute, nothing)


def _rows_where(wants: Bool[Array, " B"], x: Array) -> Array:
    return jnp.where(wants.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x))


def finish_reasons(
    rows: SamplingState, tokens: Int[Array, " B"], num_tokens_after: Int[Array, " B"]
) -> Int[Array, " B"]:
    """RUNNING, STOP_EOS, STOP_TOKEN or STOP_LENGTH for rows that just got `tokens`.

    num_tokens_after: the rows' tokens, prompt and new token included.
    """
    is_stop = jnp.any(rows.stop_ids == tokens[:, None], axis=1)
    reason = jnp.where(is_stop, STOP_TOKEN, RUNNING)
    reason = jnp.where(tokens == rows.eos_id, STOP_EOS, reason)
    reason = jnp.where(num_tokens_after < rows.min_len, RUNNING, reason)
    # Whatever min_len says: a row has no blocks past max_len.
    is_long = (reason == RUNNING) & (num_tokens_after >= rows.max_len)
    return jnp.where(is_long, STOP_LENGTH, reason).astype(jnp.int32)


def random_bits(
    key: UInt32[Array, "B 2"], sample_index: Int[Array, " B"], positions: Int[Array, " B"]
) -> UInt32[Array, " B"]:
    """32 bits a row: its key folded with its sample index, then its position, as `jax.random` does.

    The three calls of threefry are one loop, since each would compile anew.
    """
    B = positions.shape[0]
    zeros = jnp.zeros(B, jnp.uint32)
    words = jnp.stack([sample_index.astype(jnp.uint32), positions.astype(jnp.uint32), zeros])

    def fold(i: Array, key: UInt32[Array, "2 B"]) -> UInt32[Array, "2 B"]:
        count = jnp.concatenate([zeros, words[i]])
        return threefry_2x32((key[0], key[1]), count).reshape(2, B)

    high, low = lax.fori_loop(0, 3, fold, key.T)
    return high ^ low
