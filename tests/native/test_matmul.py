"""Products in C++ against float64 NumPy: all kinds of weights, ragged sizes, tiles and vectors."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.native import build, library
from jpaged.ops.grouped import GROUP, GroupedWeight, dequantize, quantize
from jpaged.ops.linear import linear
from jpaged.ops.packed import PackedWeight, pack
from tests.native.kernels import FOLDER, load_or_skip

FLOATS = ("float32", "float16", "bfloat16")
KINDS = (*FLOATS, "int8", "int4")
# Around the edges of tiles (16), panels, steps and blocks (32), and tasks (256).
SIZES = [(1, 576, 96), (2, 64, 33), (15, 31, 31), (16, 32, 32), (17, 33, 1), (33, 1, 65)]
SIZES += [(70, 100, 40), (290, 48, 64)]


@pytest.fixture(scope="module", params=["as the processor can", "vectors"])
def kernels(request, tmp_path_factory):
    """The kernels as users have them, and compiled for processors without tiles."""
    load_or_skip()
    own = pytest.MonkeyPatch()
    if request.param == "vectors":
        own.setattr(build, "FLAGS", (*build.FLAGS, "-DJPAGED_NO_TILES"))
        source = Path(build.__file__).with_name("matmul.cpp")
        made = build.build_all([source], FOLDER)[0]
        own.setitem(library._targets, "matmul", library._register(made, "jpaged_matmul"))
    yield
    own.undo()


def make_weight(rng: np.random.Generator, D: int, F: int, kind: str):
    weight = jnp.asarray(rng.normal(size=(D, F)), jnp.float32)
    return weight.astype(kind) if kind in FLOATS else quantize(weight, kind)


def values_of(weight, D: int) -> np.ndarray:
    is_grouped = isinstance(weight, GroupedWeight)
    wide = dequantize(weight, jnp.float32)[:D] if is_grouped else weight
    return np.asarray(wide, np.float64)


def largest_error(x: np.ndarray, weight: np.ndarray, kind: str) -> np.ndarray:
    """What a result may be away from the sum: float32 sums; for quantized weights, rows as integers
    of at most 127 * 128 by groups."""
    T, D = x.shape
    error = 2.0**-20 * (np.abs(x) @ np.abs(weight))
    if kind in FLOATS:
        return error
    padded = np.zeros((T, -(-D // GROUP) * GROUP))
    padded[:, :D] = np.abs(x)
    peaks = padded.reshape(T, -1, GROUP).max(axis=2)
    half_steps = np.repeat(peaks / (2 * 127 * 128), GROUP, axis=1)[:, :D]
    return error + half_steps @ np.abs(weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_numpys(kernels, size, kind):
    T, D, F = size
    rng = np.random.default_rng(0)
    weight = make_weight(rng, D, F, kind)
    x = jnp.asarray(rng.normal(size=(T, D)), kind if kind in FLOATS else "bfloat16")
    got = np.asarray(linear(pack(weight), x, jnp.float32), np.float64)
    wide, values = np.asarray(x, np.float64), values_of(weight, D)
    assert got.shape == (T, F)
    assert (np.abs(got - wide @ values) <= largest_error(wide, values, kind)).all()
    rounded = linear(pack(weight), x, x.dtype)
    np.testing.assert_array_equal(rounded, jnp.asarray(got, jnp.float32).astype(x.dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_company(kernels, kind):
    rng = np.random.default_rng(1)
    weight = pack(make_weight(rng, 200, 70, kind))
    x = jnp.asarray(rng.normal(size=(300, 200)), kind if kind in FLOATS else "float32")
    together = np.asarray(linear(weight, x, jnp.float32))
    for first, num in ((0, 1), (299, 1), (5, 2), (10, 16), (40, 31), (7, 270)):
        part = linear(weight, x[first : first + num], jnp.float32)
        np.testing.assert_array_equal(part, together[first : first + num])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_gone_wrong_harm_their_row_alone(kernels, kind, bad):
    rng = np.random.default_rng(2)
    weight = pack(make_weight(rng, 70, 40, kind))
    x = rng.normal(size=(20, 70)).astype(np.float32)
    dtype = kind if kind in FLOATS else "bfloat16"
    good = np.asarray(linear(weight, jnp.asarray(x, dtype), jnp.float32))
    x[[3, 18], [0, 69]] = bad
    got = np.asarray(linear(weight, jnp.asarray(x, dtype), jnp.float32))
    assert not np.isfinite(got[[3, 18]]).any()
    rest = np.delete(np.arange(20), [3, 18])
    np.testing.assert_array_equal(got[rest], good[rest])


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30])
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_rows_of_any_size(kernels, kind, scale):
    rng = np.random.default_rng(3)
    weight = make_weight(rng, 64, 32, kind)
    x = jnp.asarray(rng.normal(size=(3, 64)) * scale, jnp.float32)
    x = x.at[1].set(0)
    got = np.asarray(linear(pack(weight), x, jnp.float32), np.float64)
    wide, values = np.asarray(x, np.float64), values_of(weight, 64)
    assert (np.abs(got - wide @ values) <= largest_error(wide, values, kind)).all()
    assert (got[1] == 0).all()


def test_the_product_is_part_of_other_programs(kernels):
    """Under jit, scan and vmap; a derivative is refused."""
    rng = np.random.default_rng(4)
    weight = make_weight(rng, 32, 32, "float32")
    x = jnp.asarray(rng.normal(size=(3, 2, 32)), jnp.float32)

    def run(x, weight: PackedWeight):
        return jax.lax.scan(lambda carry, row: (carry, linear(weight, row, jnp.float32)), 0, x)[1]

    packed = jax.jit(pack)(weight)
    wanted = jnp.stack([linear(packed, one, jnp.float32) for one in x])
    np.testing.assert_array_equal(jax.jit(run)(x, packed), wanted)
    np.testing.assert_array_equal(jax.vmap(lambda row: linear(packed, row, jnp.float32))(x), wanted)
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda row: jnp.sum(linear(packed, row, jnp.float32)))(x[0])
