"""Rotary embedding: the angles of each scaling, and the turning of query and key heads.

Dimension i of a head is paired with i + rotary_dim / 2, as in Hugging Face checkpoints. Inverse
frequencies are computed in float32 in transformers' order of operations: one that differs in its
last bit moves the angle at position 10,000 by 1e-3.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from jpaged.rope_config import RopeConfig
from jpaged.typing import Array, Float, Int

Angles = tuple[Array, Array]  # cos and sin, from `rope_angles`


def rope_angles(
    rope: RopeConfig, positions: Int[Array, " T"], lengths: Int[Array, " T"]
) -> tuple[Float[Array, "T X"], Float[Array, "T X"]]:
    """cos and sin for the X = rotary_dim / 2 pairs of a head, float32.

    lengths: the length that each token's sequence is taken to have; only the dynamic kind reads it.
    """
    if rope.kind == "dynamic":
        inv_freq = _dynamic_inv_freq(rope, lengths)
    else:
        inv_freq = jnp.asarray(_INV_FREQ[rope.kind](rope))[None, :]
    angles = positions.astype(jnp.float32)[:, None] * inv_freq
    cos, sin = lax.platform_dependent(angles, cpu=_turn_once, default=_turn)
    return cos * rope.attention_factor, sin * rope.attention_factor


def _turn(angles: Float[Array, "T X"]) -> tuple[Float[Array, "T X"], Float[Array, "T X"]]:
    return jnp.cos(angles), jnp.sin(angles)


def _turn_once(angles: Float[Array, "T X"]) -> tuple[Float[Array, "T X"], Float[Array, "T X"]]:
    """XLA takes cos and sin for cheap, and on a CPU computes them anew in every layer that uses
    them; it does not look into a branch. Angles that are all 0 need none."""
    at_rest = (jnp.ones_like(angles), jnp.zeros_like(angles))
    return lax.cond(jnp.any(angles != 0), _turn, lambda _: at_rest, angles)


def apply_rope(
    x: Float[Array, "T H C"], cos: Float[Array, "T X"], sin: Float[Array, "T X"]
) -> Float[Array, "T H C"]:
    """Turns the first 2 X dimensions of every head by its token's angles; the others pass."""
    X = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = (x[..., i * X : (i + 1) * X].astype(jnp.float32) for i in range(2))
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([part.astype(x.dtype) for part in turned] + [x[..., 2 * X :]], axis=-1)


# ---- Inverse frequencies, one function a kind; float32[X] ----


def _exponents(rope: RopeConfig) -> np.ndarray:
    return np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)


def _default(rope: RopeConfig) -> np.ndarray:
    return np.float32(1.0) / np.float32(rope.theta) ** _exponents(rope)


def _linear(rope: RopeConfig) -> np.ndarray:
    return _default(rope) / np.float32(rope.factor)


def _llama3(rope: RopeConfig) -> np.ndarray:
    """Long waves are stretched, short ones kept, those between blended."""
    inv_freq = _default(rope)
    rotations = np.float32(rope.original_max_position / (2 * math.pi)) * inv_freq
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = np.clip((rotations - rope.low_freq_factor) / span, 0.0, 1.0).astype(np.float32)
    return (1 - kept) * inv_freq / np.float32(rope.factor) + kept * inv_freq


def _yarn(rope: RopeConfig) -> np.ndarray:
    """Dimensions that turn often in the original context are kept, slow ones stretched."""
    dim = rope.rotary_dim
    low, high = (_yarn_dimension(rope, beta) for beta in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    stretched = np.clip(ramp, 0.0, 1.0)
    powers = np.float32(rope.theta) ** _exponents(rope)
    kept = np.float32(1.0) - stretched
    return (1 / (np.float32(rope.factor) * powers)) * (1 - kept) + (1 / powers) * kept


def _yarn_dimension(rope: RopeConfig, num_rotations: float) -> float:
    """The dimension, as a real number, that turns so often in the original context."""
    wavelength = rope.original_max_position / (num_rotations * 2 * math.pi)
    return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))


_INV_FREQ: dict[str, Callable[[RopeConfig], np.ndarray]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _dynamic_inv_freq(rope: RopeConfig, lengths: Int[Array, " T"]) -> Float[Array, "T X"]:
    """The base grows with the length beyond the original context."""
    dim, original = rope.rotary_dim, rope.original_max_position
    lengths = jnp.maximum(lengths, original).astype(jnp.float32)
    growth = rope.factor * lengths / original - (rope.factor - 1.0)
    base = rope.theta * growth ** (dim / (dim - 2))
    return 1.0 / base[:, None] ** jnp.asarray(_exponents(rope))[None, :]
