"""Numbers of a KV cache in 8 bits: their codes, and the scale that a head's numbers get.

Owns what a cache's writers must agree on, in kernels and out of them. Knows no pools.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import float8

LARGEST = {"int8": 127.0, **float8.MAX}
"""The 8-bit types, and what a scale per token and head makes of a head's largest magnitude."""

LEAST_PEAK = 1e-30  # a scale must not be 0, nor so small that its inverse is infinite


def head_scale(peak: jax.Array, kv_dtype: str) -> jax.Array:
    """The scale of heads by their largest magnitude; float32, of any shape."""
    # A product: what a compiler makes of a division by a constant differs in the last bit.
    return jnp.maximum(peak, LEAST_PEAK) * (1 / LARGEST[kv_dtype])


def encode(x: jax.Array, kv_dtype: str) -> jax.Array:
    """The nearest number's code, of two as near the even one's; float32 to int8 or uint8.

    Saturates. NaN stays NaN in the 8-bit floats, and has no code in int8.
    """
    return float8.encode(x, kv_dtype) if kv_dtype in float8.FORMATS else _encode_int8(x)


def _encode_int8(x: jax.Array) -> jax.Array:
    """Rounds by an addition: beside 1.5 * 2**23, float32 has no digits behind the point.

    Triton has no rounding of its own.
    """
    anchor, anchor_bits = 1.5 * 2.0**23, 0x4B400000
    total = jnp.minimum(jnp.maximum(x, -128.0), 127.0) + anchor
    return (lax.bitcast_convert_type(total, jnp.int32) - anchor_bits).astype(jnp.int8)
