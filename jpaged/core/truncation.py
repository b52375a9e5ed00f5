"""Truncation and draw: which ids a row may get, and the one that its random bits point at.

No sort: top-k and top-p are thresholds, found by bisection over the bits of the probabilities.
Promise: probabilities are summed as integers, in any order the same sum, so that a row's token
depends on that row alone, to the bit. Vectors over the vocabulary are tiled, see `vocabulary`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jpaged.core.vocabulary import FOLD, TILE, relative, tile_at, tiled, total
from jpaged.typing import Array, Bool, Float, Int, UInt32

NUM_NEAR = 64  # the likeliest tiles of a row, searched first
ONE_BITS = 0x3F800000  # 1.0 as a float32's bits
UNKNOWN = 2**31 - 1  # more than any row weighs


class Truncation(NamedTuple):
    """What keeps an id out of the draw, in the order it is applied."""

    temperature: Float[Array, " B"]  # above 0
    min_p: Float[Array, " B"]  # 0: off
    top_k: Int[Array, " B"]  # 0: off
    top_p: Float[Array, " B"]  # 1: off
    is_on: Bool[Array, " B"]  # rows that are not are left as they are


def draw(
    rows: Truncation, bits: UInt32[Array, " B"], logits: Float[Array, "B V"]
) -> Int[Array, " B"]:
    """The id at the fraction bits / 2**32 of what truncation keeps."""
    kept = kept_shares(rows, logits)
    per_tile = jnp.sum(kept, axis=2)
    upto = jnp.cumsum(per_tile, axis=1)
    point = _multiply_high(bits, upto[:, -1])
    tile = jnp.sum(upto <= point[:, None], axis=1, dtype=jnp.int32)
    before = jnp.take_along_axis(upto - per_tile, tile[:, None], axis=1)
    inside = before + jnp.cumsum(tile_at(kept, tile), axis=1)
    token = tile * TILE + jnp.sum(inside <= point[:, None], axis=1, dtype=jnp.int32)
    return jnp.minimum(token, logits.shape[1] - 1)  # NaN logits may lead astray, not out of range


def kept_shares(rows: Truncation, logits: Float[Array, "B V"]) -> Int[Array, "B tiles ids"]:
    """Each id's share of the draw, an integer; 0 if dropped or below about 2**-31."""
    probs, shares, floor = _probs_and_floor(rows, logits)
    return jnp.where(_bits(probs) >= floor[:, None, None], shares.of(probs), 0)


def truncated_logits(rows: Truncation, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """The logits over temperature, -inf for ids that are dropped; rows that are off stay as is."""
    (B, V), temperature = logits.shape, jnp.where(rows.is_on, rows.temperature, 1.0)
    probs, _, floor = _probs_and_floor(rows, logits)
    is_kept = (_bits(probs) >= floor[:, None, None]).reshape(B, -1)[:, :V]
    return jnp.where(is_kept | ~rows.is_on[:, None], logits / temperature[:, None], -jnp.inf)


def _probs_and_floor(rows: Truncation, logits: Float[Array, "B V"]):
    """Relative probabilities [B tiles ids], their weights in the draw, and the floor's bits[B]."""
    probs = tiled(relative(logits, jnp.where(rows.is_on, rows.temperature, 1.0)), 0.0)
    shares = _Weights(_scale(probs), jnp.float32(0.5))
    return probs, shares, _truncate(rows, probs, shares)


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
    rows: Truncation, probs: Float[Array, "B tiles ids"], shares: _Weights
) -> Int[Array, " B"]:
    """The floor that min-p, then top-k, then top-p of what is left, put under a row."""
    has_top_k, has_top_p = rows.is_on & (rows.top_k > 0), rows.is_on & (rows.top_p < 1.0)
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
