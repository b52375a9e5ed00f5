"""What checkpoints hold, repacked for the kernels: to the bit what the quantizers' tools have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.ops import grouped
from pallas_kernels import repack
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.quant_weight import dequantize
from pallas_kernels.tiling import MatmulTiling
from tests.kernels import stored_linears

SLICES = stored_linears.slices()
TILING = MatmulTiling(tile_m=32, tile_f=64, tile_d=64, num_splits=1, num_warps=4, num_stages=2)


@pytest.mark.parametrize("form", SLICES)
def test_weights_are_those_of_the_tools(form):
    weight = stored_linears.repacked(form, SLICES[form])
    np.testing.assert_array_equal(dequantize(weight).T, SLICES[form]["dequant"])


@pytest.mark.slow
def test_the_wide_sweep_of_formats(shared_fixtures):
    """Every linear with references, of every checkpoint of packed or 8-bit weights."""
    seen = set()
    for folder in sorted((shared_fixtures / "fixtures" / "formats").iterdir()):
        form = folder.name
        if not form.startswith(("awq", "gptq", "fp8", "ct")) or form == "ct_kv_only":
            continue
        for name, parts, about in stored_linears.linears(folder):
            weight = stored_linears.repacked(form, parts)
            got = dequantize(weight).T
            np.testing.assert_array_equal(got, about["dequant"], err_msg=f"{form} {name}")
            seen.add(form)
    assert len(seen) >= 20, seen


@pytest.mark.parametrize("form", ["awq_g64", "gptq_w4_g64_asym_desc_act", "ct_w8a16_g64"])
def test_products_are_those_of_the_tools(form, shared_fixtures):
    *_, (_, parts, about) = stored_linears.linears(shared_fixtures / "fixtures" / "formats" / form)
    weight = stored_linears.repacked(form, parts)
    assert (weight.order is not None) == ("desc_act" in form)
    x = jnp.asarray(about["linear_in"])
    got = quant_matmul(x, weight, tiling=TILING, interpret=True)
    np.testing.assert_allclose(got, about["linear_out"], rtol=1e-5, atol=1e-5)


def test_repacking_runs_inside_jit():
    parts = SLICES["gptq_w4_g64_desc_act"]
    arrays = parts["qweight"], parts["qzeros"], parts["scales"]

    def convert(qweight, qzeros, scales):
        return repack.from_gptq(qweight, qzeros, scales, parts["g_idx"], bits=4, group_size=64)

    jax.tree.map(np.testing.assert_array_equal, jax.jit(convert)(*arrays), convert(*arrays))


def test_zeros_that_are_left_out_are_the_middle():
    for form, middle in (("gptq_w4_g64_desc_act", 8), ("gptq_w8_g128", 0)):
        parts = SLICES[form]
        D = parts["g_idx"].size
        options = {
            "bits": parts["qweight"].shape[0] * 32 // D,
            "group_size": D // len(parts["scales"]),
        }
        full = repack.from_gptq(parts["qweight"], parts["qzeros"], parts["scales"], **options)
        np.testing.assert_array_equal(full.zeros, np.full(full.scales.shape, middle))  # sym=true
        short = repack.from_gptq(parts["qweight"], None, parts["scales"], **options)
        assert short.zeros is None
        np.testing.assert_array_equal(dequantize(short), dequantize(full))


def test_gptq_of_2_bits_and_of_version_2():
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 4, (16, 32))  # [F D]
    zeros = rng.integers(0, 4, (2, 16))
    scales = rng.uniform(1, 2, (2, 16)).astype(np.float16)
    shifts = 2 * np.arange(16, dtype=np.uint32)
    qweight = np.bitwise_or.reduce(
        numbers.T.reshape(2, 16, 16).astype(np.uint32) << shifts[:, None], axis=1
    )
    qzeros = np.bitwise_or.reduce(zeros.astype(np.uint32) << shifts, axis=1)[:, None]
    weight = repack.from_gptq(
        qweight.view(np.int32), qzeros.view(np.int32), scales, bits=2, group_size=16, is_v2=True
    )
    wanted = (numbers.T - zeros.repeat(16, axis=0)) * scales.astype(np.float32).repeat(16, axis=0)
    np.testing.assert_array_equal(dequantize(weight), wanted)


def test_grouped_weights_stay_what_they_are():
    rng = np.random.default_rng(1)
    for bits in ("int8", "int4"):
        weight = grouped.quantize(jnp.asarray(rng.normal(size=(64, 24)), jnp.float32), bits)
        packed = repack.from_gguf_groups(weight.numbers.T, weight.scales, weight.leasts)
        np.testing.assert_array_equal(dequantize(packed), grouped.dequantize(weight, jnp.float32))


def test_groups_and_bits_that_can_not_be_are_named():
    parts = SLICES["gptq_w4_g64_desc_act"]
    arrays = parts["qweight"], parts["qzeros"], parts["scales"], parts["g_idx"]
    with pytest.raises(ValueError, match=r"128 inputs into groups of 32: its groups have \[64\]"):
        repack.from_gptq(*arrays, bits=4, group_size=32)
    with pytest.raises(ValueError, match="bits=3 is not supported; 2, 4 and 8 are"):
        repack.from_gptq(*arrays, bits=3, group_size=64)
    with pytest.raises(ValueError, match=r"20 inputs are not 3 groups"):
        repack.from_int8(np.zeros((4, 20), np.int8), np.zeros((4, 3), np.float16))
    with pytest.raises(ValueError, match=r"one, one for each output, or \(1, 2\)"):
        repack.from_float8(np.zeros((4, 200), np.uint8), np.zeros((1, 3)), block=(128, 128))
