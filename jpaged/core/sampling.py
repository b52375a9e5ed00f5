"""Sampling: from a row's logits to its next token, and the decision whether the row stops.

Owns `SamplingState` and the draw. Knows nothing of blocks, requests or models.
Promise: a token depends on its row alone (logits, parameters, key, position), to the bit, whatever
the other rows of the step are. Probabilities are summed as integers, in any order the same sum.

No sort: top-k and top-p are thresholds, found by bisection over the bits of the probabilities.
    raw logits -> log-probability of the token -> temperature -> min-p -> top-k -> top-p -> draw
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.extend.random import threefry_2x32

from jpaged.core.vocabulary import FOLD, TILE, argmax, logprobs_of, relative, tile_at, tiled, total
from jpaged.sampling_params import GREEDY_TEMPERATURE
from jpaged.typing import Array, Bool, Float, Int, UInt32

RUNNING, STOP_EOS, STOP_TOKEN, STOP_LENGTH = 0, 1, 2, 3
"""Why a row stops, as `finish_reasons` tells it."""

NUM_NEAR = 64  # the likeliest tiles of a row, searched first
ONE_BITS = 0x3F800000  # 1.0 as a float32's bits
UNKNOWN = 2**31 - 1  # more than any row weighs


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


def init_sampling_state(num_rows: int, num_stop_ids: int) -> SamplingState:
    """Rows that sample greedily and know no stop."""
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
    )


def seed_key(seed: int) -> np.ndarray:
    """The key u32[2] of a seed modulo 2**64, on the host: JAX alone would drop the upper half."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


class Sampled(NamedTuple):
    """A token for each row that samples, 0 for the others."""

    tokens: Int[Array, " B"]
    logprobs: Float[Array, " B"]  # under the raw logits; 0 where not wanted


def sample(
    rows: SamplingState,
    sample_index: Int[Array, " B"],
    positions: Int[Array, " B"],
    logits: Float[Array, "B V"],
    *,
    is_sampling: Bool[Array, " B"],
) -> Sampled:
    """Chooses the next token of each row.

    rows: the parameters of these B rows. sample_index: which of its request's n samples a row is.
    positions: where the new tokens go. logits: float32, without NaN.
    Equal logits: argmax takes the lowest id, a threshold keeps them all. top_k = 1 is argmax.
    """
    is_random = is_sampling & (rows.temperature >= GREEDY_TEMPERATURE) & (rows.top_k != 1)
    best = argmax(logits)

    def draw() -> Int[Array, " B"]:
        bits = _random_bits(rows.key, sample_index, positions)
        return jnp.where(is_random, _draw(rows, bits, logits, is_random), best)

    tokens = lax.cond(jnp.any(is_random), draw, lambda: best)
    wants = is_sampling & rows.want_logprobs
    logprobs = lax.cond(
        jnp.any(wants),
        lambda: jnp.where(wants, logprobs_of(logits, tokens), 0.0),
        lambda: jnp.zeros(tokens.shape, jnp.float32),
    )
    return Sampled(jnp.where(is_sampling, tokens, 0), logprobs)


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


# --- the draw. Vectors over the vocabulary are tiled, see `vocabulary` ---


def _random_bits(
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


def _draw(
    rows: SamplingState,
    bits: UInt32[Array, " B"],
    logits: Float[Array, "B V"],
    is_random: Bool[Array, " B"],
) -> Int[Array, " B"]:
    """The id at the fraction bits / 2**32 of what truncation keeps."""
    kept = _kept_shares(rows, logits, is_random)
    per_tile = jnp.sum(kept, axis=2)
    upto = jnp.cumsum(per_tile, axis=1)
    point = _multiply_high(bits, upto[:, -1])
    tile = jnp.sum(upto <= point[:, None], axis=1, dtype=jnp.int32)
    before = jnp.take_along_axis(upto - per_tile, tile[:, None], axis=1)
    inside = before + jnp.cumsum(tile_at(kept, tile), axis=1)
    token = tile * TILE + jnp.sum(inside <= point[:, None], axis=1, dtype=jnp.int32)
    return jnp.minimum(token, logits.shape[1] - 1)  # NaN logits may lead astray, not out of range


def _kept_shares(
    rows: SamplingState, logits: Float[Array, "B V"], is_random: Bool[Array, " B"]
) -> Int[Array, "B tiles ids"]:
    """Each id's share of the draw, an integer; 0 if dropped or below about 2**-31."""
    probs = tiled(relative(logits, jnp.where(is_random, rows.temperature, 1.0)), 0.0)
    shares = _Weights(_scale(probs), jnp.float32(0.5))
    floor = _truncate(rows, probs, shares, is_random)
    return jnp.where(_bits(probs) >= floor[:, None, None], shares.of(probs), 0)


def _scale(probs: Float[Array, "B tiles ids"]) -> Float[Array, " B"]:
    """The power of two that brings a row's total to [2**29, 2**30)."""
    _, exponent = jnp.frexp(total(probs))
    return jnp.ldexp(jnp.ones(exponent.shape, jnp.float32), 30 - exponent)


class _Weights(NamedTuple):
    """Ids as integers, so that sums are exact, below 2**31, and blind to order.

    An id's share of the draw is its probability, scaled and rounded. Scaled by 0 and 1 added, ids
    are counted.
    """

    scale: Float[Array, " B"]
    plus: Float[Array, ""]

    def of(self, probs: Float[Array, "B *_"]) -> Int[Array, "B *_"]:
        scale = self.scale.reshape(-1, *(1,) * (probs.ndim - 1))
        return (probs * scale + self.plus).astype(jnp.int32)


def _multiply_high(bits: UInt32[Array, " B"], total: Int[Array, " B"]) -> Int[Array, " B"]:
    """floor(bits * total / 2**32) in 32-bit arithmetic: uniform in [0, total)."""
    total = total.astype(jnp.uint32)
    high, low, t_high, t_low = bits >> 16, bits & 0xFFFF, total >> 16, total & 0xFFFF
    middle = high * t_low + (low * t_low >> 16)
    carry = (middle & 0xFFFF) + low * t_high
    return (high * t_high + (middle >> 16) + (carry >> 16)).astype(jnp.int32)


# --- truncation: which ids stay, as a floor under the bits of their probabilities ---


def _bits(probs: Float[Array, "*_"]) -> Int[Array, "*_"]:
    """Bits of floats that are not negative: they sort as the floats do."""
    return lax.bitcast_convert_type(probs, jnp.int32)


def _truncate(
    rows: SamplingState,
    probs: Float[Array, "B tiles ids"],
    shares: _Weights,
    is_random: Bool[Array, " B"],
) -> Int[Array, " B"]:
    """The floor that min-p, then top-k, then top-p of what is left, put under a row."""
    has_top_k, has_top_p = is_random & (rows.top_k > 0), is_random & (rows.top_p < 1.0)
    min_p_floor = _bits(rows.min_p)

    def count(_: Int[Array, " B"]):
        weights = _Weights(jnp.zeros_like(shares.scale), jnp.ones_like(shares.plus))
        return weights, rows.top_k, has_top_k

    def share(floor: Int[Array, " B"]):
        left = _mass(probs, shares, floor)
        target = jnp.ceil(rows.top_p * left.astype(jnp.float32)).astype(jnp.int32)
        return shares, jnp.clip(target, 1, left), has_top_p

    def search() -> Int[Array, " B"]:
        near = _likeliest_tiles(probs)

        def raise_floor(turn: Array, floor: Int[Array, " B"]) -> Int[Array, " B"]:
            weights, target, is_on = lax.cond(turn == 0, count, share, floor)
            return _threshold(probs, near, weights, target, is_on, floor)

        # One loop for both, since each would compile the search anew.
        first = jnp.where(jnp.any(has_top_k), 0, 1)
        end = jnp.where(jnp.any(has_top_p), 2, 1)
        return lax.fori_loop(first, end, raise_floor, min_p_floor)

    return lax.cond(jnp.any(has_top_k | has_top_p), search, lambda: min_p_floor)


def _mass(
    probs: Float[Array, "B tiles ids"], weights: _Weights, floor: Int[Array, " B"]
) -> Int[Array, " B"]:
    """The weight of the ids at or above the floor."""
    # Without the barrier XLA takes the bits of all slices out of a loop around, and keeps them.
    probs, floor = lax.optimization_barrier((probs, floor))
    B, tiles, ids = probs.shape
    slices = probs.reshape(B, FOLD, tiles // FOLD, ids)
    kept = jnp.zeros((B, tiles // FOLD, ids), jnp.int32)
    for i in range(FOLD):  # cut before comparing: masking all of `probs` first takes twice as long
        part = slices[:, i]
        kept = kept + jnp.where(_bits(part) >= floor[:, None, None], weights.of(part), 0)
    return jnp.sum(jnp.sum(kept, axis=2), axis=1)


class _Near(NamedTuple):
    """The tiles with a row's likeliest ids: every id at or above `floor` is in them."""

    probs: Float[Array, "B near ids"]
    floor: Int[Array, " B"]


def _likeliest_tiles(probs: Float[Array, "B tiles ids"]) -> _Near:
    if probs.shape[1] <= NUM_NEAR:
        return _Near(probs, jnp.zeros(probs.shape[0], jnp.int32))
    # Without the barrier XLA merges top_k with the slice below and sorts everything.
    top, tiles = lax.optimization_barrier(lax.top_k(jnp.max(probs, axis=2), NUM_NEAR + 1))
    near = jnp.take_along_axis(probs, tiles[:, :NUM_NEAR, None], axis=1, mode="clip")
    return _Near(near, _bits(top[:, -1]) + 1)


class _Bracket(NamedTuple):
    low: Int[Array, " B"]  # leaves at least the target, or nothing does
    low_mass: Int[Array, " B"]  # UNKNOWN until the first turn has weighed it
    high: Int[Array, " B"]  # leaves less
    high_mass: Int[Array, " B"]


def _threshold(
    probs: Float[Array, "B tiles ids"],
    near: _Near,
    weights: _Weights,
    target: Int[Array, " B"],
    is_on: Bool[Array, " B"],
    floor: Int[Array, " B"],
) -> Int[Array, " B"]:
    """The highest floor, not below `floor`, that leaves a weight of `target`; else `floor`.

    When the likeliest tiles hold the answer for all rows, searching them is a tenth of the work.
    """
    near_floor = jnp.maximum(near.floor, floor)
    in_near = (_mass(near.probs, weights, near_floor) >= target) | (near_floor == floor)
    is_near = jnp.all(in_near | ~is_on)
    low = jnp.where(is_near, near_floor, floor)

    def is_open(bracket: _Bracket) -> Bool[Array, " B"]:
        # Once the bracket weighs less than two of the lightest ids it can hold, it holds one, and
        # the ids above `low` are the answer.
        lightest = weights.of(lax.bitcast_convert_type(bracket.low, jnp.float32))
        is_crowded = bracket.low_mass - bracket.high_mass - lightest >= lightest
        return is_on & (bracket.high - bracket.low > 1) & is_crowded

    def halve(bracket: _Bracket) -> _Bracket:
        middle = bracket.low + (bracket.high - bracket.low) // 2
        middle = jnp.where(bracket.low_mass == UNKNOWN, bracket.low, middle)
        mass = lax.cond(
            is_near,
            lambda: _mass(near.probs, weights, middle),
            lambda: _mass(probs, weights, middle),
        )
        up = mass >= target
        return _Bracket(
            jnp.where(up, middle, bracket.low),
            jnp.where(up, mass, bracket.low_mass),
            jnp.where(up, bracket.high, middle),
            jnp.where(up, bracket.high_mass, mass),
        )

    start = _Bracket(
        low,
        jnp.full(low.shape, UNKNOWN, jnp.int32),
        jnp.full(low.shape, ONE_BITS + 2, jnp.int32),  # so that the first turn is taken
        jnp.zeros(low.shape, jnp.int32),
    )
    found = lax.while_loop(lambda bracket: jnp.any(is_open(bracket)), halve, start)
    return jnp.where(is_on & (found.low_mass < UNKNOWN), found.low, floor)
