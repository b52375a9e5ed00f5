"""Numbers of 8 bits, four to a word: a pool of them is fetched and decoded by the word.

Owns the order of columns that comes of it. Word j of a key has its columns 4j to 4j + 3, and byte p
of all its words is piece p: columns p, p + 4, p + 8, ... Sums over columns may be taken piece by
piece, so long as queries are cut up alike.

Byte by byte, decoding a tile of float8_e4m3fn takes 2.8 times the instructions (jax 0.10.2), and
more time than an H200's memory needs for it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

PIECES = 4
FACTOR = {"int8": 1.0, "float8_e4m3fn": 256.0, "float8_e5m2": 1.0}
"""What a decoded number is to be multiplied by."""

_EVEN = np.uint32(0x00FF00FF)  # bytes 0 and 2, counted from the lowest
_ODD = np.uint32(0xFF00FF00)
_SIGN_ODD = np.uint32(0x80008000)
_MAGNITUDE_EVEN = np.uint32(0x007F007F)
_MAGNITUDE_ODD = np.uint32(0x7F007F00)


def as_words(pool: jax.Array) -> jax.Array:
    """[N S K C] of 8 bits as uint32 [N S K C/4]: on a GPU the same memory by another name."""
    return lax.bitcast_convert_type(pool.reshape(*pool.shape[:-1], -1, PIECES), jnp.uint32)


def decode(words: jax.Array, kind: str) -> tuple[jax.Array, ...]:
    """The four pieces of uint32 words, each of the words' shape in float16, short of `FACTOR`.

    Exact, but for a NaN of float8_e4m3fn, which is read as 480: only a token that is NaN itself
    has written it.

    Args:
        words: as `as_words` makes them.
        kind: "int8", "float8_e4m3fn" or "float8_e5m2".
    """
    # Two bytes at once move to where float16 has the bits: e5m2 is its upper half, and e4m3fn fits
    # below it, with another bias that the factor makes up for. 0x6400 + n is 1024 + n.
    if kind == "float8_e4m3fn":
        even = ((words << 8) & _SIGN_ODD) | ((words & _MAGNITUDE_EVEN) << 7)
        odd = (words & _SIGN_ODD) | ((words & _MAGNITUDE_ODD) >> 1)
    elif kind == "float8_e5m2":
        even, odd = (words << 8) & _ODD, words & _ODD
    else:
        positive = words ^ np.uint32(0x80808080)
        even = (positive & _EVEN) | np.uint32(0x64006400)
        odd = ((positive >> 8) & _EVEN) | np.uint32(0x64006400)
    low = np.uint32(0xFFFF)
    bits = (even & low, odd & low, even >> 16, odd >> 16)
    pieces = (lax.bitcast_convert_type(x.astype(jnp.uint16), jnp.float16) for x in bits)
    return tuple(x - 1152 for x in pieces) if kind == "int8" else tuple(pieces)
