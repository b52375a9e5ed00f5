"""Products with weights of 8 and 4 bits, interpreted, against float64 of what the numbers are."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gpus import gpu_of
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.quant_weight import QuantWeight, dequantize, pack_int4, pad_inputs, unpack_int4
from pallas_kernels.tiling import MatmulTiling, choose_matmul
from tests.oracles import quantized

ROUNDING = 2.0**-21  # of a sum in float32, to the sum of what is added in size


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    x_dtype: str
    M: int
    D: int
    F: int
    inputs_per_scale: int
    outputs_per_scale: int = 1
    scale_dtype: str = "float16"
    offset: str | None = None
    is_ordered: bool = True
    num_splits: int = 1

    def __str__(self):
        group = "all" if self.inputs_per_scale == self.D else self.inputs_per_scale
        return f"{self.kind}-{self.x_dtype}-{self.offset}-{group}x{self.outputs_per_scale}"


CASES = [
    Case("int4", "bfloat16", 5, 96, 40, 32, offset="least"),
    Case("int4", "float16", 19, 128, 32, 64, offset="zero", scale_dtype="bfloat16"),
    Case("int4", "float32", 3, 200, 24, 128, offset="zero", is_ordered=False),
    Case("int4", "bfloat16", 1, 160, 32, 160, num_splits=2),
    Case("int4", "bfloat16", 2, 70, 16, 70, offset="least"),
    Case("int8", "bfloat16", 17, 160, 40, 32, num_splits=3),
    Case("int8", "float32", 2, 100, 32, 100),
    Case("int8", "float16", 4, 128, 16, 64, offset="zero"),
    Case("int8", "bfloat16", 2, 96, 16, 48, offset="zero", scale_dtype="float32"),
    Case("float8_e4m3fn", "bfloat16", 3, 200, 150, 128, 128, scale_dtype="float32"),
    Case("float8_e4m3fn", "float16", 16, 64, 32, 64, scale_dtype="float32"),
    Case("float8_e4m3fn", "float32", 2, 90, 20, 90, 20, scale_dtype="float32"),
    Case("float8_e5m2", "bfloat16", 2, 64, 16, 64, 16, scale_dtype="float32"),
]
MORE = [
    dataclasses.replace(
        case, x_dtype=x_dtype, M=M, D=D, F=F, inputs_per_scale=min(group, D), num_splits=num_splits
    )
    for case in CASES[:3] + CASES[5:6] + CASES[7:8] + CASES[9:10]
    for x_dtype in ("bfloat16", "float32")
    for M, D, F, num_splits in ((1, 64, 16, 1), (40, 96, 200, 2), (33, 320, 48, 3))
    for group in (32, 64, 128, D)
]


def draw(case, rng):
    """A weight, and [D F] of the oracle."""
    F, D = case.F, case.D
    groups = -(-D // case.inputs_per_scale)
    offsets: dict[str, Any] = {}
    zeros_of_kind = None
    if case.kind == "int4":
        numbers = rng.integers(0, 16, (F, D)).astype(np.uint8)
        stored, values = pack_int4(jnp.asarray(numbers)), numbers
        if case.offset is None:
            zeros_of_kind = np.full((groups, F), 8)
    elif case.kind == "int8":
        numbers = rng.integers(-128, 128, (F, D)).astype(np.int8)
        stored, values = pad_inputs(jnp.asarray(numbers)), numbers
    else:
        dtype = getattr(ml_dtypes, case.kind)
        values = rng.normal(size=(F, D)).astype(dtype)
        stored = pad_inputs(jnp.asarray(values.view(np.uint8)))
    if case.offset == "zero":
        low, high = (0, 16) if case.kind == "int4" else (-128, 128)
        offsets["zeros"] = rng.integers(low, high, (groups, F)).astype(values.dtype)
    if case.offset == "least":
        offsets["leasts"] = rng.normal(size=(groups, F)).astype(np.float16)
    columns = -(-F // case.outputs_per_scale)
    scales = rng.uniform(0.1, 2, (groups, columns)).astype(jnp.dtype(case.scale_dtype))
    order = None if case.is_ordered else rng.permutation(D).astype(np.int32)
    spans: dict[str, Any] = {
        "inputs_per_scale": case.inputs_per_scale,
        "outputs_per_scale": case.outputs_per_scale,
        "order": order,
    }
    weight = QuantWeight(
        numbers=stored, scales=scales, kind=case.kind, num_inputs=D, **spans, **offsets
    )
    weight = jax.tree.map(jnp.asarray, weight)
    oracle: dict[str, Any] = offsets if zeros_of_kind is None else {"zeros": zeros_of_kind}
    return weight, quantized.dequantize(values, scales, **spans, **oracle)


def tiling_of(case, **changes):
    small = {"tile_m": 16, "tile_f": 16, "tile_d": 64, "num_warps": 4, "num_stages": 2}
    return MatmulTiling(**(small | {"num_splits": case.num_splits} | changes))


def check(case, rng):
    weight, wanted = draw(case, rng)
    x = jnp.asarray(rng.normal(size=(case.M, case.D)), case.x_dtype)
    got = quant_matmul(x, weight, dtype="float32", tiling=tiling_of(case), interpret=True)
    wide = np.asarray(x, np.float64)
    np.testing.assert_array_less(
        np.abs(np.asarray(got, np.float64) - wide @ wanted),
        # Zeros and leasts are added to sums of what they are taken from.
        ROUNDING * (np.abs(wide) @ np.abs(wanted) + size_of_parts(weight, wide)) + 1e-30,
    )


def size_of_parts(weight, x):
    if weight.leasts is None:
        return 0
    row = np.arange(weight.num_inputs) // weight.inputs_per_scale
    return np.abs(x) @ np.abs(np.asarray(weight.leasts, np.float64))[row]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_those_of_the_numbers(case):
    check(case, np.random.default_rng(0))


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=lambda case: f"{case}-{case.M}x{case.D}x{case.F}")
def test_products_of_many_sizes(case):
    check(case, np.random.default_rng(1))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dequantized_weights_are_what_the_numbers_are(case):
    weight, wanted = draw(case, np.random.default_rng(2))
    got = np.asarray(dequantize(weight), np.float64)
    np.testing.assert_allclose(got, wanted, rtol=2.0**-22, atol=2.0**-22)


def test_a_row_has_the_same_bits_beside_any_others():
    case = CASES[0]
    rng = np.random.default_rng(3)
    weight, _ = draw(case, rng)
    x = rng.normal(size=(20, case.D)).astype(jnp.bfloat16)
    x[3] = np.nan
    many = quant_matmul(jnp.asarray(x), weight, tiling=tiling_of(case), interpret=True)
    few = quant_matmul(jnp.asarray(x[17:]), weight, tiling=tiling_of(case), interpret=True)
    np.testing.assert_array_equal(many[17:], few)
    assert np.isnan(many[3].astype(np.float32)).all()
    assert not np.isnan(np.delete(many.astype(np.float32), 3, axis=0)).any()


def test_a_result_is_rounded_once():
    case = CASES[5]
    weight, _ = draw(case, np.random.default_rng(4))
    x = jnp.asarray(np.random.default_rng(5).normal(size=(case.M, case.D)), jnp.bfloat16)
    rounded = quant_matmul(x, weight, tiling=tiling_of(case), interpret=True)
    exact = quant_matmul(x, weight, dtype="float32", tiling=tiling_of(case), interpret=True)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))


def test_no_rows_give_no_rows():
    weight, _ = draw(CASES[0], np.random.default_rng(6))
    x = jnp.zeros((0, CASES[0].D), jnp.bfloat16)
    assert quant_matmul(x, weight, interpret=True).shape == (0, CASES[0].F)


def test_what_lies_behind_the_inputs_does_not_count():
    case = Case("int8", "float32", 2, 20, 16, 20)
    weight, wanted = draw(case, np.random.default_rng(7))
    filled = weight.numbers.at[:, 20:].set(100)
    x = jnp.asarray(np.random.default_rng(8).normal(size=(2, 20)), jnp.float32)
    weight = dataclasses.replace(weight, numbers=filled)
    got = quant_matmul(x, weight, tiling=tiling_of(case), interpret=True)
    np.testing.assert_allclose(got, np.asarray(x, np.float64) @ wanted, rtol=1e-5, atol=1e-4)


def test_four_bits_are_packed_in_halves_of_runs():
    numbers = jnp.arange(64, dtype=jnp.uint8).reshape(1, 64) % 16
    packed = pack_int4(numbers)
    assert packed.shape == (1, 32)
    assert packed[0, 1] == 0x11  # inputs 1 and 17
    assert packed[0, 18] == 0x22  # inputs 34 and 50
    np.testing.assert_array_equal(unpack_int4(packed), numbers)


# --- tilings ---


def test_tilings_follow_the_rows_and_the_gpu():
    sizes: dict[str, Any] = {
        "D": 4096,
        "F": 4096,
        "itemsize": 2,
        "bits": 4,
        "group": 128,
        "gpu": gpu_of("NVIDIA H100 80GB HBM3"),
    }

    def tiles(M, **changes):
        return choose_matmul(None, M=M, **(sizes | changes))

    assert [tiles(M).tile_m for M in (1, 17, 40, 100, 1000)] == [16, 32, 64, 64, 128]
    assert tiles(1).num_splits == 4  # 64 tiles on 132 multiprocessors
    assert tiles(1, F=49152).num_splits == tiles(1, D=256).num_splits == 1
    assert tiles(100, F=64).num_splits == 1
    assert tiles(1, group=32).tile_f == 2 * tiles(1).tile_f
    assert tiles(1, group=32, bits=8).tile_f == tiles(1).tile_f
    assert tiles(100, itemsize=4).tile_m == 32


def test_a_tiling_without_room_is_told_before_the_launch():
    case = CASES[5]
    weight, _ = draw(case, np.random.default_rng(9))
    tiling = tiling_of(case, tile_f=256, tile_d=256, num_stages=9)
    x = jnp.zeros((1, case.D), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"shared memory.*fewer stages or a smaller tile_d"):
        quant_matmul(x, weight, tiling=tiling, interpret=True)


# --- errors ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "int5"}, "int5.*choose one of int4, int8"),
        ({"kind": "int4"}, "int4 numbers are uint8"),
        ({"num_inputs": 170}, "of 160 inputs; 170 inputs need a multiple of 16.*pad to 176"),
        ({"inputs_per_scale": 64}, r"scales of shape \(5, 40\) must be \(3, 40\)"),
        ({"zeros": np.zeros((5, 40), np.uint8)}, "zeros of int8 are int8, these are uint8"),
        ({"leasts": np.zeros((5, 4), np.float16)}, r"leasts of shape \(5, 4\)"),
        ({"order": np.zeros(3, np.int32)}, r"order of shape \(3,\) must be \(160,\)"),
    ],
)
def test_arrays_that_do_not_fit_are_named(change, message):
    weight, _ = draw(CASES[5], np.random.default_rng(10))
    x = jnp.zeros((1, 160), jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        quant_matmul(x, dataclasses.replace(weight, **change), interpret=True)


def test_offsets_are_of_one_kind_and_not_for_floats():
    ones = {"zeros": np.zeros((5, 40), np.int8), "leasts": np.zeros((5, 40), np.float16)}
    weight, _ = draw(CASES[5], np.random.default_rng(11))
    with pytest.raises(ValueError, match="one at most"):
        dequantize(dataclasses.replace(weight, **ones))
    weight, _ = draw(CASES[10], np.random.default_rng(11))
    with pytest.raises(ValueError, match="float8_e4m3fn numbers have none"):
        dequantize(dataclasses.replace(weight, leasts=np.zeros((1, 32), np.float16)))


def test_rows_that_do_not_fit_are_named():
    weight, _ = draw(CASES[5], np.random.default_rng(12))
    with pytest.raises(ValueError, match=r"x is bfloat16 \(1, 128\); .* \[M 160\]"):
        quant_matmul(jnp.zeros((1, 128), jnp.bfloat16), weight, interpret=True)
    with pytest.raises(ValueError, match="x is int32"):
        quant_matmul(jnp.zeros((1, 160), jnp.int32), weight, interpret=True)


def test_groups_too_small_for_a_tensor_core_are_named():
    weight, _ = draw(Case("int8", "bfloat16", 1, 100, 16, 20), np.random.default_rng(13))
    with pytest.raises(ValueError, match=r"16 inputs of int8 numbers at once.*shared by 20"):
        quant_matmul(jnp.zeros((1, 100), jnp.bfloat16), weight, interpret=True)
