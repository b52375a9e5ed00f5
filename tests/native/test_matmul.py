"""Products in C++ against float64 NumPy: all kinds of weights, ragged sizes, tiles and vectors."""

import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.native import build, library, matmul
from jpaged.ops.grouped import GROUP, GroupedWeight, dequantize, quantize
from jpaged.ops.linear import add_linear, gated_linear, linear
from jpaged.ops.norm import RMSNorm
from jpaged.ops.packed import PackedWeight, pack
from jpaged.ops.rows import NormedRows, made
from tests.native.kernels import FOLDER, FORMS, load_or_skip

FLOATS = ("float32", "float16", "bfloat16")
KINDS = (*FLOATS, "int8", "int4")
# Around the edges of tiles (16), panels, steps and blocks (32), and tasks (256).
SIZES = [(1, 576, 96), (2, 64, 33), (15, 31, 31), (16, 32, 32), (17, 33, 1), (33, 1, 65)]
SIZES += [(70, 100, 40), (290, 48, 64)]


@pytest.fixture(scope="module", params=FORMS)
def kernels(request, tmp_path_factory):
    """The kernels as users have them, and compiled for processors that can do less."""
    load_or_skip()
    own = pytest.MonkeyPatch()
    if flags := FORMS[request.param]:
        own.setattr(build, "FLAGS", (*build.FLAGS, *flags))
        source = Path(build.__file__).with_name("matmul.cpp")
        made = build.build_all([source], FOLDER)[0]
        handler = library._handler(made, "jpaged_matmul")
        own.setitem(library._targets, "matmul", library._register(made, handler))
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


def draw_rows(T: int, D: int, dtype: str, *, is_offset: bool) -> NormedRows:
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(T, D)) * 30, dtype)
    weight = jnp.asarray(rng.normal(size=D), dtype)
    return NormedRows(x, RMSNorm(weight, 1e-5, is_offset=is_offset))


def rows_in_float64(rows: NormedRows) -> np.ndarray:
    norm = rows.norm
    x, weight = np.asarray(rows.x, np.float64), np.asarray(norm.weight, np.float64)
    normalized = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + norm.eps)
    return normalized * (1 + weight if norm.is_offset else weight)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("is_offset", [False, True])
def test_rows_made_on_the_way_are_those_that_are_made_before(kernels, is_offset, dtype):
    """A weight that copies its rows shows them: rounded twice at most, as XLA's are."""
    T, D = 37, 75  # not whole tasks, steps or vectors
    rows = draw_rows(T, D, dtype, is_offset=is_offset)
    got = np.asarray(add_linear(pack(jnp.eye(D, dtype=dtype)), rows, "float32"), np.float64)
    want, last_bit = rows_in_float64(rows), float(jnp.finfo(dtype).eps)
    # 1 + weight may be a small difference of larger ones.
    positive = replace(rows.norm, weight=abs(rows.norm.weight))
    size = np.abs(rows_in_float64(replace(rows, norm=positive)))
    assert (np.abs(got - want) <= 1.5 * last_bit * np.abs(want) + 2.0**-20 * size).all()
    before = np.asarray(made(rows), np.float64)
    assert (np.abs(got - before) <= 4 * last_bit * (np.abs(want) + size)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_made_on_the_way_for_all_weights(kernels, kind):
    rng = np.random.default_rng(6)
    rows = draw_rows(9, 64, kind if kind in FLOATS else "bfloat16", is_offset=False)
    weight = make_weight(rng, 64, 40, kind)
    shown = np.asarray(add_linear(pack(jnp.eye(64, dtype=rows.dtype)), rows, rows.dtype))
    got = add_linear(pack(weight), rows, jnp.float32)
    wide, values = shown.astype(np.float64), values_of(weight, 64)
    assert (np.abs(got - wide @ values) <= largest_error(wide, values, kind)).all()


def gated_in_float64(gates: np.ndarray, ups: np.ndarray, activation: str) -> np.ndarray:
    if activation == "silu":
        return gates / (1 + np.exp(-gates)) * ups
    if activation == "gelu_tanh":
        inner = np.sqrt(2 / np.pi) * (gates + 0.044715 * gates**3)
        return 0.5 * gates * (1 + np.tanh(inner)) * ups
    return 0.5 * gates * (1 + np.vectorize(math.erf)(gates / np.sqrt(2))) * ups


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("activation", "num_out"),
    # Whole panels; half a panel, and an activation that C++ does not have, are left to XLA.
    [("silu", 64), ("gelu_tanh", 32), ("silu", 48), ("gelu", 64)],
)
def test_gates_are_multiplied_with_ups(kernels, kind, activation, num_out):
    """What is gated are the rounded products, rounded once more."""
    T, D = 70, 64
    rng = np.random.default_rng(10)
    dtype = kind if kind in FLOATS else "bfloat16"
    weight = pack(make_weight(rng, D, 2 * num_out, kind))
    x = jnp.asarray(rng.normal(size=(T, D)), dtype)
    x = x.at[:2].set(x[:2] * jnp.asarray([[8], [-8]], dtype))  # where exp has no number
    got = np.asarray(gated_linear(weight, x, dtype, activation), np.float64)
    gates, ups = np.split(np.asarray(linear(weight, x, dtype), np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        want = gated_in_float64(gates, ups, activation)
    assert got.shape == (T, num_out)
    is_native = activation in matmul.GATINGS and num_out % matmul.PANEL == 0
    # XLA in 16 bits rounds what is within an activation as well.
    last_bit = float(jnp.finfo(dtype).eps) * (1 if is_native else 4)
    # An activation of a negative number is a small difference of larger ones.
    allowed = last_bit * np.abs(want) + (2.0**-20 if is_native else last_bit) * np.abs(gates * ups)
    assert (np.abs(got - want) <= allowed).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_gated_row_has_the_same_bits_in_any_company(kernels, kind):
    rng = np.random.default_rng(11)
    weight = pack(make_weight(rng, 96, 128, kind))
    dtype = kind if kind in FLOATS else "float32"
    x = jnp.asarray(rng.normal(size=(300, 96)), dtype)
    together = np.asarray(gated_linear(weight, x, dtype, "silu"))
    for first, num in ((0, 1), (299, 1), (10, 16), (40, 31), (7, 270)):
        part = gated_linear(weight, x[first : first + num], dtype, "silu")
        np.testing.assert_array_equal(part, together[first : first + num])


def test_gates_of_half_a_panel_are_refused(kernels):
    weight = pack(jnp.zeros((32, 96)))
    with pytest.raises(ValueError, match="panels of 32, not 48"):
        matmul.multiply(
            *(jnp.zeros((1, 32)), weight.panels, None, None),
            gating="silu",
            kind="float32",
            num_out=48,
            dtype="float32",
        )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_out", [64, 50])
def test_a_rounded_product_is_added_to_a_residual(kernels, dtype, num_out):
    rng = np.random.default_rng(7)
    x = jnp.asarray(rng.normal(size=(35, 40)), dtype)
    residual = jnp.asarray(rng.normal(size=(35, num_out)), dtype)
    weight = pack(make_weight(rng, 40, num_out, dtype))
    got = add_linear(weight, x, dtype, residual)
    np.testing.assert_array_equal(got, residual + add_linear(weight, x, dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_live", [0, 1, 33, 40])
def test_rows_of_zeros_at_the_end_are_zeros(kernels, kind, num_live):
    """They are skipped; what is before them has the same bits, what is added is all there is."""
    rng = np.random.default_rng(12)
    dtype = kind if kind in FLOATS else "bfloat16"
    weight = pack(make_weight(rng, 50, 64, kind))
    x = jnp.asarray(rng.normal(size=(40, 50)), dtype).at[num_live:].set(-0.0)
    x = x.at[3].set(0)  # between others
    residual = jnp.asarray(rng.normal(size=(40, 64)), dtype)
    norm = RMSNorm(jnp.asarray(rng.normal(size=50), dtype), 1e-5, is_offset=False)
    for rows in (x, NormedRows(x, norm)):
        live = replace(rows, x=x[:num_live]) if isinstance(rows, NormedRows) else x[:num_live]
        added = np.asarray(add_linear(weight, rows, dtype, residual))
        gated = np.asarray(gated_linear(weight, rows, dtype, "silu"))
        np.testing.assert_array_equal(added[num_live:], residual[num_live:])
        np.testing.assert_array_equal(gated[num_live:], np.zeros_like(gated[num_live:]))
        if num_live:
            want = add_linear(weight, live, dtype, residual[:num_live])
            np.testing.assert_array_equal(added[:num_live], want)
            want = gated_linear(weight, live, dtype, "silu")
            np.testing.assert_array_equal(gated[:num_live], want)


def test_a_norm_without_eps_keeps_its_nan(kernels):
    """Zeros over zeros are no zeros."""
    norm = RMSNorm(jnp.ones(32), 0.0, is_offset=False)
    rows = NormedRows(jnp.zeros((2, 32)).at[0].set(1), norm)
    got = np.asarray(add_linear(pack(jnp.ones((32, 32))), rows, "float32"))
    assert np.isfinite(got[0]).all()
    assert np.isnan(got[1]).all()


def test_large_results_are_all_there(kernels):
    """From a megabyte on they are written past the processor's cache."""
    x = jnp.asarray(np.random.default_rng(8).normal(size=(600, 32)), "bfloat16")
    weight = pack(jnp.asarray(np.random.default_rng(9).normal(size=(32, 992)), "bfloat16"))
    whole = np.asarray(linear(weight, x, "bfloat16"))
    parts = [np.asarray(linear(weight, x[i : i + 100], "bfloat16")) for i in range(0, 600, 100)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


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
