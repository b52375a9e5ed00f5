"""The choice of tiles, and the shared memory they take."""

import itertools

import pytest

from pallas_kernels.gpus import current_gpu, gpu_of
from pallas_kernels.tiling import (
    DecodeTiling,
    PrefillTiling,
    check_decode,
    check_prefill,
    decode_rows,
    decode_shared_memory,
    decode_tiling,
    power_of_two,
    prefill_shared_memory,
    prefill_tiling,
)

A100, H200 = gpu_of("NVIDIA A100-SXM4-80GB"), gpu_of("NVIDIA H200")


@pytest.mark.parametrize(
    ("kind", "num_sms", "shared_kib"),
    [
        ("NVIDIA A100-SXM4-80GB", 108, 163),
        ("NVIDIA A10G", 72, 99),
        ("NVIDIA H100 80GB HBM3", 132, 227),
        ("NVIDIA H20", 78, 227),
        ("NVIDIA H200", 132, 227),
        ("NVIDIA L4", 58, 99),
        ("NVIDIA L40S", 142, 99),
        ("NVIDIA GeForce RTX 4090", 128, 99),
        ("Tomorrow's GPU", 108, 163),
    ],
)
def test_gpus_by_the_names_jax_has_for_them(kind, num_sms, shared_kib):
    gpu = gpu_of(kind)
    assert (gpu.kind, gpu.num_sms, gpu.shared_memory) == (kind, num_sms, shared_kib * 1024)
    assert gpu_of(kind, 7).num_sms == 7


def test_where_there_is_no_gpu_an_a100_is_assumed():
    gpu = current_gpu()
    assert gpu.kind == "cpu"
    assert (gpu.num_sms, gpu.shared_memory) == (A100.num_sms, A100.shared_memory)


@pytest.mark.parametrize(("size", "padded"), [(1, 16), (16, 16), (17, 32), (80, 128), (256, 256)])
def test_powers_of_two(size, padded):
    assert power_of_two(size) == padded


@pytest.mark.parametrize("tile", [0, 8, 48])
def test_tiles_are_powers_of_two(tile):
    with pytest.raises(ValueError, match=f"tile_kv={tile} must be a power of two, 16 or more"):
        DecodeTiling(tile_kv=tile, num_splits=1, num_warps=4, num_stages=2)
    with pytest.raises(ValueError, match=r"tile_q=24 must be a power of two.* 32 is the next"):
        PrefillTiling(tile_q=24, tile_kv=16, num_warps=4, num_stages=2)
    with pytest.raises(ValueError, match="num_splits=0 must be 1 or more"):
        DecodeTiling(tile_kv=16, num_splits=0, num_warps=4, num_stages=2)


# What the compiler said a program takes on sm_80, and on sm_90a where that is more (jax 0.10.2):
# tile_kv, num_stages, rows, width, bytes of a stored number and of a multiplied one.
COMPILED = [
    ((64, 2, 16, 128, 2, 2), 38_912),
    ((64, 5, 16, 128, 2, 2), 72_192),
    ((64, 7, 16, 128, 2, 2), 105_216),
    ((128, 5, 16, 64, 2, 2), 72_704),
    ((32, 5, 16, 256, 2, 2), 75_008),
    ((64, 5, 16, 256, 2, 2), 141_824),
    ((64, 5, 16, 128, 1, 2), 40_960),
    ((64, 2, 16, 128, 1, 2), 23_040),
    ((128, 5, 16, 64, 1, 2), 41_984),
    ((32, 5, 16, 128, 4, 4), 76_032),
    ((64, 5, 32, 128, 2, 2), 78_336),
    ((64, 5, 64, 128, 2, 2), 115_200),
    ((32, 5, 64, 256, 2, 2), 131_328),
]


@pytest.mark.parametrize(("tile", "compiled"), COMPILED)
def test_shared_memory_is_estimated_at_what_compilers_take(tile, compiled):
    tile_kv, num_stages, rows, width, kv_itemsize, itemsize = tile
    tiling = DecodeTiling(tile_kv=tile_kv, num_splits=1, num_warps=4, num_stages=num_stages)
    sizes = {"rows": rows, "width": width, "kv_itemsize": kv_itemsize, "itemsize": itemsize}
    estimated = decode_shared_memory(tiling, **sizes)
    assert compiled <= estimated <= 1.1 * compiled + 2048


@pytest.mark.parametrize("gpu", [A100, H200, gpu_of("NVIDIA L4")], ids=lambda gpu: gpu.kind)
def test_every_choice_fits_its_gpu(gpu):
    for group, width, itemsize in itertools.product((1, 17, 71), (16, 64, 128, 256), (2, 4)):
        rows = decode_rows(group, width=width, itemsize=itemsize)
        sizes = {"rows": rows, "width": width, "itemsize": itemsize, "gpu": gpu}
        for kv_itemsize in {1, 2, itemsize}:  # numbers are multiplied in no narrower type
            sizes["kv_itemsize"] = kv_itemsize
            tiling = decode_tiling(num_programs=64, max_visible=4096, **sizes)
            check_decode(tiling, **sizes)


# The same of prefill: tiling, width and bytes of what is multiplied.
PREFILL_COMPILED = [
    (A100, (64, 32, 4, 2), 128, 2, 36_864),
    (A100, (64, 32, 4, 5), 128, 2, 53_504),
    (A100, (64, 64, 4, 5), 64, 2, 41_472),
    (A100, (64, 32, 8, 5), 256, 2, 102_656),
    (A100, (64, 16, 8, 2), 128, 4, 53_504),
    (H200, (128, 64, 8, 2), 128, 2, 98_304),
    (H200, (128, 64, 8, 5), 128, 2, 131_584),
    (H200, (128, 64, 8, 5), 64, 2, 66_048),
    (H200, (128, 32, 8, 5), 256, 2, 164_096),
    (H200, (64, 16, 8, 2), 128, 4, 53_504),
]


@pytest.mark.parametrize(("gpu", "tile", "width", "itemsize", "compiled"), PREFILL_COMPILED)
def test_shared_memory_of_prefill_is_estimated_too(gpu, tile, width, itemsize, compiled):
    names = ("tile_q", "tile_kv", "num_warps", "num_stages")
    tiling = PrefillTiling(**dict(zip(names, tile, strict=True)))
    estimated = prefill_shared_memory(tiling, width, itemsize, gpu)
    assert compiled <= estimated <= 1.25 * compiled + 2048


@pytest.mark.parametrize("gpu", [A100, H200, gpu_of("NVIDIA L4")], ids=lambda gpu: gpu.kind)
def test_every_choice_of_prefill_fits_its_gpu(gpu):
    types = ((2, 2), (2, 1), (4, 4), (4, 2), (4, 1))
    for group, head_dim, itemsizes in itertools.product((1, 7, 16), (8, 80, 128, 192, 256), types):
        sizes = dict(zip(("itemsize", "kv_itemsize"), itemsizes, strict=True))
        tiling = prefill_tiling(head_dim=head_dim, group=group, gpu=gpu, **sizes)
        width, itemsize = power_of_two(head_dim), sizes["itemsize"]
        check_prefill(tiling, width=width, group=group, itemsize=itemsize, gpu=gpu)


def test_large_groups_are_cut_into_what_registers_hold():
    assert decode_rows(5, width=128, itemsize=2) == 16
    assert decode_rows(71, width=64, itemsize=2) == 64
    assert decode_rows(48, width=256, itemsize=2) == 32
    assert decode_rows(48, width=128, itemsize=4) == 16


def choose(*, num_programs, max_visible, gpu=H200):
    return decode_tiling(
        num_programs=num_programs,
        max_visible=max_visible,
        rows=16,
        width=128,
        itemsize=2,
        kv_itemsize=2,
        gpu=gpu,
    )


def test_few_rows_are_split_until_every_processor_has_work():
    # 8 KV heads: 264 programs, two for each of 132 processors.
    assert choose(num_programs=8, max_visible=8192).num_splits == 33
    assert choose(num_programs=8, max_visible=8192, gpu=A100).num_splits == 27
    # But no further than two tiles of 64 keys each.
    assert choose(num_programs=8, max_visible=1024).num_splits == 8
    assert choose(num_programs=8, max_visible=64).num_splits == 1


def test_many_rows_are_split_only_where_that_is_cheap():
    assert choose(num_programs=512, max_visible=1024).num_splits == 1
    assert choose(num_programs=512, max_visible=4096).num_splits == 3
    assert choose(num_programs=4096, max_visible=4096).num_splits == 1


def test_tiles_are_no_longer_than_what_is_visible():
    assert choose(num_programs=8, max_visible=100_000).tile_kv == 64
    assert choose(num_programs=8, max_visible=20).tile_kv == 32
