"""Vectors over the vocabulary: sums, maxima and log-probabilities, a tile of ids at a time.

Promise: a row's results have the same bits whatever other rows there are. XLA's own reductions over
a vocabulary are slow on a CPU, and change their order with the batch.
"""

import functools
import operator

import jax.numpy as jnp
from jax import lax

from jpaged.typing import Array, Float, Int

TILE = 64  # ids summed together
FOLD = 16  # tiles come in multiples of this: sums add this many slices first, which vectorizes


def tiled(x: Float[Array, "B V"], fill: float) -> Float[Array, "B tiles ids"]:
    """Cuts a row into tiles of TILE ids, with `fill` behind the last id."""
    B, V = x.shape
    padding = -V % (TILE * FOLD)
    if padding:
        x = jnp.pad(x, ((0, 0), (0, padding)), constant_values=fill)
    return x.reshape(B, -1, TILE)


def tile_at(x: Array, tile: Int[Array, " B"]) -> Array:
    """One tile of each row."""
    return jnp.take_along_axis(x, tile[:, None, None], axis=1, mode="clip")[:, 0]


def argmax(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """First the tile, then the id in it: a direct argmax costs XLA ten times as much on a CPU."""
    tiles = tiled(logits, -jnp.inf)
    tile = jnp.argmax(jnp.max(tiles, axis=2), axis=1)
    return (tile * TILE + jnp.argmax(tile_at(tiles, tile), axis=1)).astype(jnp.int32)


def relative(logits: Float[Array, "B V"], temperature: Float[Array, " B"]) -> Float[Array, "B V"]:
    """Probabilities relative to the likeliest id's, which has exactly 1."""
    top = jnp.max(logits, axis=1, keepdims=True)
    # Equal infinities have no difference; all ids at -inf are equally likely.
    scaled = jnp.where(logits == top, 0.0, (logits - top) / temperature[:, None])
    return jnp.exp(scaled)


def logprobs_of(logits: Float[Array, "B V"], tokens: Int[Array, " B"]) -> Float[Array, " B"]:
    """Log-probabilities of one id a row."""
    return normalised(logits, jnp.take_along_axis(logits, tokens[:, None], axis=1))[:, 0]


def rank_of(logits: Float[Array, "B V"], tokens: Int[Array, " B"]) -> Int[Array, " B"]:
    """1 + the number of ids with greater logits than the row's token."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    is_greater = tiled(logits, -jnp.inf) > chosen[:, :, None]
    return 1 + jnp.sum(jnp.sum(is_greater, axis=2, dtype=jnp.int32), axis=1)


def normalised(logits: Float[Array, "B V"], chosen: Float[Array, "B k"]) -> Float[Array, "B k"]:
    """Log-probabilities of ids with the logits `chosen`."""
    probs = tiled(relative(logits, jnp.ones(logits.shape[0], jnp.float32)), 0.0)
    top = jnp.max(logits, axis=1, keepdims=True)
    return jnp.where(chosen == top, 0.0, chosen - top) - jnp.log(total(probs))[:, None]


def total(probs: Float[Array, "B tiles ids"]) -> Float[Array, " B"]:
    """A sum by additions of whole slices: their order is given, whatever the batch size."""
    B = probs.shape[0]
    flat = probs.reshape(B, -1)
    while flat.shape[1] > 1:
        flat = jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % FOLD)))
        # The barrier keeps XLA from writing all levels out as one long expression.
        slices = jnp.moveaxis(flat.reshape(B, FOLD, -1), 1, 0)
        flat = lax.optimization_barrier(functools.reduce(operator.add, slices))
    return flat[:, 0]


def top_logprobs(
    logits: Float[Array, "B V"], k: int
) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """The k likeliest ids of each row, see `likeliest`, with their log-probabilities first."""
    top, ids = likeliest(logits, k)
    return normalised(logits, top), ids


def likeliest(logits: Float[Array, "B V"], k: int) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """The k greatest logits of each row, the greatest first, and their ids.

    k: at most V. Only the k tiles with the highest maxima can hold them: a fifth of the time of a
    direct `top_k` on a CPU. Of equal logits the lower id comes first; the last of the k may be any.
    """
    B = logits.shape[0]
    if k == 0:
        return jnp.zeros((B, 0), jnp.float32), jnp.zeros((B, 0), jnp.int32)
    tiles = tiled(logits, -jnp.inf)
    num_tiles = min(k, tiles.shape[1])
    # Without the barrier XLA merges top_k with what follows and sorts everything.
    _, tile = lax.optimization_barrier(lax.top_k(jnp.max(tiles, axis=2), num_tiles))
    tile = jnp.sort(tile, axis=1)  # so that ties go to the lower id
    near = jnp.take_along_axis(tiles, tile[:, :, None], axis=1, mode="clip")
    top, place = lax.top_k(near.reshape(B, -1), k)
    ids = jnp.take_along_axis(tile, place // TILE, axis=1) * TILE + place % TILE
    return top, ids.astype(jnp.int32)


def likeliest_or_all(
    logits: Float[Array, "B V"], k: int
) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """`likeliest`, but all V ids come as they are: a sort takes longer than the rest of a step."""
    B, V = logits.shape
    if k < V:
        return likeliest(logits, k)
    return logits, jnp.tile(jnp.arange(V, dtype=jnp.int32)[None], (B, 1))
