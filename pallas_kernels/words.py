"""Numbers of 8 bits, two or four to a word: a pool of them is fetched and decoded by the word.

Owns the order of columns that comes of it. Word j of a key has, of four, its columns 4j to 4j + 3,
and byte p of all its words is piece p: columns p, p + 4, p + 8, ... Sums over columns may be taken
piece by piece, so long as queries are cut up alike.

Byte by byte, decoding a tile of float8_e4m3fn takes 2.8 times the instructions (jax 0.10.2), and
more time than an H200's memory needs for it.
"""

import jax
import jax.numpy as jnp
from jax import lax

WORDS = {2: jnp.uint16, 4: jnp.uint32}
"""The type of a word by the numbers in it, which is the number of pieces."""

FACTOR = {"int8": 1.0, "float8_e4m3fn": 256.0, "float8_e5m2": 1.0}
"""What a decoded number is to be multiplied by."""

# For words of two only the lower half counts. Bytes are counted from the lowest.
_EVEN, _ODD = 0x00FF00FF, 0xFF00FF00
_SIGN_ODD = 0x80008000
_MAGNITUDE_EVEN, _MAGNITUDE_ODD = 0x007F007F, 0x7F007F00
_SIGNS = 0x80808080
_1024 = 0x64006400  # float16's 1024; with n below 1024 in its lowest bits, 1024 + n


def num_pieces(head_dim: int) -> int:
    """Pieces of keys with that many columns; 1: keys are not read in words.

    A piece has 32 columns, padded, or more: on fewer each of four warps would do the work of all.
    """
    if head_dim > 64 and head_dim % 4 == 0:
        return 4
    return 2 if head_dim > 32 and head_dim % 2 == 0 else 1


def as_words(pool: jax.Array) -> jax.Array:
    """[N S K C] of 8 bits in words [N S K C/pieces]: on a GPU the same memory by another name."""
    num = num_pieces(pool.shape[-1])
    return lax.bitcast_convert_type(pool.reshape(*pool.shape[:-1], -1, num), WORDS[num])


def decode(words: jax.Array, kind: str) -> tuple[jax.Array, ...]:
    """The pieces of words, each of the words' shape in float16, short of `FACTOR`.

    Exact, but for a NaN of float8_e4m3fn, which is read as 480: only a token that is NaN itself
    has written it.

    Args:
        words: as `as_words` makes them.
        kind: "int8", "float8_e4m3fn" or "float8_e5m2".
    """
    bits = tuple(x.astype(jnp.uint16) for x in _place(words, kind))
    pieces = (lax.bitcast_convert_type(x, jnp.float16) for x in bits)
    # What is 1024 too large was 128 too large before.
    return tuple(x - 1152 for x in pieces) if kind == "int8" else tuple(pieces)


def _place(words: jax.Array, kind: str) -> tuple[jax.Array, ...]:
    """The bits of each byte where float16 has them, in the lower half of a word."""

    def constant(bits: int) -> jax.Array:
        return jnp.array(bits & int(jnp.iinfo(words.dtype).max), words.dtype)

    # Every other byte at once. e5m2 is the upper half of a float16, and e4m3fn fits in below the
    # sign, with another bias that the factor makes up for.
    if kind == "float8_e4m3fn":
        even = (words << 8) & constant(_SIGN_ODD) | (words & constant(_MAGNITUDE_EVEN)) << 7
        odd = words & constant(_SIGN_ODD) | (words & constant(_MAGNITUDE_ODD)) >> 1
    elif kind == "float8_e5m2":
        even, odd = (words << 8) & constant(_ODD), words & constant(_ODD)
    else:
        positive = words ^ constant(_SIGNS)
        even = positive & constant(_EVEN) | constant(_1024)
        odd = (positive >> 8) & constant(_EVEN) | constant(_1024)
    if words.dtype == jnp.uint16:
        return even, odd
    low = constant(0xFFFF)
    return even & low, odd & low, even >> 16, odd >> 16
