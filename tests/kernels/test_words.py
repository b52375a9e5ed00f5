"""Numbers of 8 bits read four at a time: every code, against NumPy's types."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import words

CODES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("head_dim", "num"), [(64, 2), (128, 4)])
def test_every_code_is_decoded_exactly(kind, head_dim, num):
    codes = np.random.default_rng(0).permutation(CODES).reshape(1, -1, 1, head_dim)
    dtype = np.int8 if kind == "int8" else getattr(ml_dtypes, kind)
    want = codes.view(dtype).astype(np.float32)
    pool = codes.view(np.int8) if kind == "int8" else codes
    pieces = words.decode(words.as_words(jnp.asarray(pool)), kind)
    assert [piece.dtype for piece in pieces] == [np.float16] * num
    got = np.stack(jax.device_get(pieces), axis=-1).astype(np.float32).reshape(codes.shape)
    if kind == "float8_e4m3fn":  # a NaN is read as what would come after 448
        want = np.where(np.isnan(want), np.where(codes & 0x80, -480, 480), want)
    with np.errstate(invalid="ignore"):  # signalling NaN
        got *= words.FACTOR[kind]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("head_dim", "num"), [(16, 1), (32, 1), (40, 2), (63, 1), (64, 2), (66, 2), (80, 4), (256, 4)]
)
def test_pieces_are_no_narrower_than_32_columns(head_dim, num):
    assert words.num_pieces(head_dim) == num
