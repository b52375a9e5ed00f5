"""8-bit floats as bits in uint8: float8_e4m3fn and float8_e5m2, encoded and decoded.

Owns the two formats. The arithmetic is on integers of 16 and 32 bits, since Triton has no
float8_e4m3fn before sm_89 and XLA on a CPU writes float8 arrays slowly; it runs inside kernels and
outside of them, and gives the same numbers everywhere.

    sign | exponent | mantissa        bias   largest   infinities   NaN
    e4m3fn   1 | 4 | 3                 7       448       none         0x7f
    e5m2     1 | 5 | 2                15     57344       0x7c         0x7d to 0x7f
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

SIGN = 0x80
MAGNITUDE = 0x7F


class _Format(NamedTuple):
    mantissa_bits: int
    bias: int
    largest: int  # the code of the largest finite number
    nan: int


FORMATS = {
    "float8_e4m3fn": _Format(mantissa_bits=3, bias=7, largest=0x7E, nan=0x7F),
    "float8_e5m2": _Format(mantissa_bits=2, bias=15, largest=0x7B, nan=0x7E),
}
MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""The largest finite number of each kind."""


def encode(x: jax.Array, kind: str) -> jax.Array:
    """The uint8 codes of float32 numbers: the nearest, and of two as near the even one.

    Saturates: what is beyond the largest finite number, infinities included, becomes that number
    with its sign (as vLLM stores a cache; ml_dtypes would give NaN or infinity). NaN stays NaN.

    Args:
        x: float32, any shape.
        kind: "float8_e4m3fn" or "float8_e5m2".
    """
    form = _format(kind)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    code = jnp.where(
        magnitude < (127 - form.bias + 1) << 23,
        _encode_subnormal(magnitude, form),
        _encode_normal(magnitude, form),
    )
    code = jnp.minimum(code, form.largest)
    code = jnp.where(magnitude > 0x7F800000, form.nan, code)
    return (code | ((bits >> 24) & SIGN)).astype(jnp.uint8)


def _encode_normal(magnitude: jax.Array, form: _Format) -> jax.Array:
    """Cuts the mantissa short after rounding, and moves the exponent to its new bias.

    A carry out of the mantissa goes into the exponent, as it should.
    """
    shift = 23 - form.mantissa_bits
    is_odd = (magnitude >> shift) & 1
    rounded = magnitude + ((1 << (shift - 1)) - 1) + is_odd
    return (rounded >> shift) - ((127 - form.bias) << form.mantissa_bits)


def _encode_subnormal(magnitude: jax.Array, form: _Format) -> jax.Array:
    """The number of smallest steps in x, rounded by an addition.

    Beside a power of two whose last mantissa bit is worth one step, the sum keeps whole steps.
    The smallest normal number comes out as the code that follows the largest subnormal one.
    """
    step_exponent = 1 - form.bias - form.mantissa_bits
    anchor = 2.0 ** (23 + step_exponent)
    anchor_bits = (127 + 23 + step_exponent) << 23
    total = lax.bitcast_convert_type(magnitude, jnp.float32) + anchor
    return lax.bitcast_convert_type(total, jnp.int32) - anchor_bits


def decode(bits: jax.Array, kind: str, dtype: jax.typing.DTypeLike = jnp.float16) -> jax.Array:
    """The numbers that uint8 codes stand for; exact for every code, NaN and infinity included.

    Args:
        bits: uint8, any shape.
        kind: "float8_e4m3fn" or "float8_e5m2".
        dtype: float16, or float32 or bfloat16, which hold every number of either kind as well.
    """
    form, dtype = _format(kind), jnp.dtype(dtype)
    # float16 has e5m2's exponent: both kinds fit in, one shifted further up than the other.
    # Widened with its sign, which then stands above the exponent's bits too: cleared there.
    wide = lax.bitcast_convert_type(bits, jnp.int8).astype(jnp.int16)
    half_bits = wide << (10 - form.mantissa_bits)
    if kind == "float8_e4m3fn":
        half_bits &= ~0x4000
    half = lax.bitcast_convert_type(half_bits, jnp.float16)
    if kind == "float8_e5m2":
        return half if dtype == jnp.float16 else half.astype(jnp.float32).astype(dtype)
    x = half if dtype == jnp.float16 else half.astype(jnp.float32)
    x = x * (2.0 ** (15 - form.bias))
    return jnp.where((wide & MAGNITUDE) == form.nan, jnp.nan, x).astype(dtype)


def _format(kind: str) -> _Format:
    if kind not in FORMATS:
        raise ValueError(f"8-bit float {kind!r} is unknown; choose one of {', '.join(FORMATS)}")
    return FORMATS[kind]
