"""Tiles of the kernels: their choice by device, type and shape, and the shared memory they take.

Nothing is tuned at run time: `scripts/tune_kernels.py` measures, and what it finds is written here.
Knows nothing of what the kernels compute.
"""

from dataclasses import dataclass, replace

from pallas_kernels.gpus import KIB, Gpu

MIN_TILE = 16  # the least a tensor core takes along any side
MAX_ROWS = 64  # the most queries or heads one program takes: their sums are in registers
MAX_MATMUL_SPLITS = 8


@dataclass(frozen=True, kw_only=True)
class DecodeTiling:
    """How `paged_decode` cuts up a row's context."""

    tile_kv: int  # keys taken at a time: a power of two, 16 or more
    num_splits: int  # programs that share the context of one row and KV head
    num_warps: int
    num_stages: int  # 5 and more: the next keys are fetched while these are used

    def __post_init__(self):
        _check_powers_of_two(tile_kv=self.tile_kv)
        _check_positive(
            num_splits=self.num_splits, num_warps=self.num_warps, num_stages=self.num_stages
        )


@dataclass(frozen=True, kw_only=True)
class PrefillTiling:
    """How `paged_prefill` cuts up queries and keys."""

    tile_q: int  # queries times heads of a group that share their keys: a power of two
    tile_kv: int  # keys taken at a time: a power of two
    num_warps: int
    num_stages: int

    def __post_init__(self):
        _check_powers_of_two(tile_q=self.tile_q, tile_kv=self.tile_kv)
        _check_positive(num_warps=self.num_warps, num_stages=self.num_stages)


@dataclass(frozen=True, kw_only=True)
class MatmulTiling:
    """How `quant_matmul` cuts up a product [M D] x [D F]."""

    tile_m: int
    tile_f: int
    tile_d: int
    num_splits: int  # programs that share the sum over D of one tile of results
    num_warps: int
    num_stages: int

    def __post_init__(self):
        _check_powers_of_two(tile_m=self.tile_m, tile_f=self.tile_f, tile_d=self.tile_d)
        _check_positive(
            num_splits=self.num_splits, num_warps=self.num_warps, num_stages=self.num_stages
        )


def choose_matmul(
    given: MatmulTiling | None,
    *,
    M: int,
    D: int,
    F: int,
    itemsize: int,
    bits: int,
    group: int,
    gpu: Gpu,
) -> MatmulTiling:
    """How a product of rows [M D] with a quantized weight [D F] is cut up.

    Args:
        given: the caller's choice, or None.
        M, D, F: the sizes.
        itemsize: bytes of the rows' type.
        bits: of a number of the weight.
        group: inputs with one scale.
        gpu: compiled for.

    Raises:
        ValueError: the given tiling lacks shared memory for its tiles.
    """
    tiling = given or _matmul_tiling(M, D, F, itemsize, bits * group < 256, gpu)
    # Rows and numbers in flight, and the numbers of one step as floats.
    in_flight = tiling.tile_m * itemsize + tiling.tile_f * bits // 8
    num_bytes = (tiling.num_stages * in_flight + tiling.tile_f * itemsize) * tiling.tile_d
    check_shared_memory(
        f"quant_matmul with {tiling}", num_bytes, gpu, "take fewer stages or a smaller tile_d"
    )
    return tiling


def _matmul_tiling(
    M: int, D: int, F: int, itemsize: int, has_short_groups: bool, gpu: Gpu
) -> MatmulTiling:
    """Few rows: tiles that read the weight in long stretches; where there are too few of them to
    fill the GPU, several programs share a sum. Many rows: tiles that use a decoded number often.
    float32 rows are multiplied without tensor cores, in smaller tiles.

    Sizes are those that spill no register and copy 16 bytes at a time, as compiled for sm_80 and
    sm_90a. Groups of less than 32 bytes need more outputs for that, and registers for their sums.
    """
    if itemsize == 4:
        tile_m, tile_f, tile_d, num_warps, num_stages = min(power_of_two(M), 32), 32, 32, 4, 3
    elif M <= 64:
        tile_m, tile_d, num_warps, num_stages = power_of_two(M), 128, 4, 4
        tile_f = 128 if has_short_groups and M <= 32 else 64
    else:
        tile_m, tile_d, num_warps, num_stages = 64 if M <= 128 else 128, 64, 8, 3
        tile_f = 64 if has_short_groups else 128
    num_programs = -(-M // tile_m) * -(-F // tile_f)
    # Two programs on a multiprocessor hide each other's waits. Less than 512 inputs are not worth
    # what it costs to add what they give.
    num_splits = min(2 * gpu.num_sms // num_programs, D // 512, MAX_MATMUL_SPLITS)
    return MatmulTiling(
        tile_m=tile_m,
        tile_f=tile_f,
        tile_d=tile_d,
        num_splits=max(num_splits, 1) if M <= 64 else 1,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def power_of_two(size: int, at_least: int = MIN_TILE) -> int:
    """The least power of two that holds `size`, and no less than `at_least`, a power of two."""
    return max(at_least, 1 << (size - 1).bit_length())


def decode_rows(group: int, *, width: int, itemsize: int) -> int:
    """The query heads of a group that one program decodes, padded; a group may take several.

    For `width` and `itemsize` see `decode_tiling`.
    """
    # Without tensor cores, as float32 is multiplied, a program has more in its registers.
    most_numbers = (8 if itemsize < 4 else 2) * KIB
    return min(power_of_two(group), max(MIN_TILE, min(most_numbers // width, MAX_ROWS)))


# Numbers of 16 bits that are widened to be multiplied without tensor cores take registers: tile_kv
# and num_stages of those tilings that spill none (jax 0.10.2), by the head dim, padded.
_DECODE_WIDENED = {64: (32, 2), 128: (16, 5), 256: (32, 1)}


def decode_tiling(
    *,
    num_programs: int,
    max_visible: int,
    rows: int,
    width: int,
    itemsize: int,
    kv_itemsize: int,
    gpu: Gpu,
) -> DecodeTiling:
    """The tiling of a decode.

    Args:
        num_programs: rows of the batch times KV heads, times the tiles of a group.
        max_visible: the most keys a query can see.
        rows: query heads of a program, padded.
        width: the head dim, padded.
        itemsize: bytes of the type that queries, keys and values are multiplied in.
        kv_itemsize: bytes of a number in the cache.
        gpu: compiled for.
    """
    # Two buffers of 16 KiB of keys and as many values: two or three programs per processor.
    tile_kv, num_stages = 16 * KIB // (width * itemsize), 5
    if (itemsize, kv_itemsize) == (4, 2):
        tile_kv, num_stages = _DECODE_WIDENED[max(width, 64)]
    tile_kv = min(max(tile_kv, MIN_TILE), 128, power_of_two(max_visible))
    ahead = DecodeTiling(
        tile_kv=tile_kv,
        num_splits=_num_splits(num_programs, -(-max_visible // tile_kv), gpu),
        # Sums of 64 rows, or of any where no tensor core makes them, are too many for four warps.
        num_warps=8 if rows == MAX_ROWS or itemsize == 4 else 4,
        num_stages=num_stages,
    )
    sizes = {"rows": rows, "width": width, "itemsize": itemsize, "kv_itemsize": itemsize}
    if decode_shared_memory(ahead, **sizes) <= gpu.shared_memory:
        return ahead
    return replace(ahead, num_stages=min(num_stages, 2))


def _num_splits(num_programs: int, num_tiles: int, gpu: Gpu) -> int:
    """Splits of contexts of up to `num_tiles`, each of which `num_programs` programs share.

    As many as give each processor two programs, which it takes to hide the memory's latency, if
    two tiles are left to each. And, while tiles are left that make the merge cheap, enough for
    several rounds: contexts differ, and no processor should wait long for the last program.
    """
    to_fill = min(-(-2 * gpu.num_sms // num_programs), num_tiles // 2)
    to_even_out = min(-(-8 * gpu.num_sms // num_programs), num_tiles // 16)
    return max(1, to_fill, to_even_out)


def check_decode(
    tiling: DecodeTiling, *, rows: int, width: int, kv_itemsize: int, itemsize: int, gpu: Gpu
) -> None:
    """Raises `ValueError` where a decode takes more shared memory than the GPU has for a program.

    `kv_itemsize` is of the type that keys are stored in; for the rest see `decode_tiling`.
    """
    check_shared_memory(
        f"paged_decode with {tiling}, {rows} rows and a head dim of {width}",
        decode_shared_memory(
            tiling, rows=rows, width=width, kv_itemsize=kv_itemsize, itemsize=itemsize
        ),
        gpu,
        "take a smaller tile_kv, or fewer num_stages",
    )


def decode_shared_memory(
    tiling: DecodeTiling, *, rows: int, width: int, kv_itemsize: int, itemsize: int
) -> int:
    """Bytes that a decoding program takes, or a little more: as compiled for sm_80 and sm_90a.

    Triton needs two stages to fetch block ids and two to fetch keys before it uses them, so every
    second stage is one more buffer of both.
    """
    num_buffers = max(1, (tiling.num_stages - 1) // 2)
    buffers = num_buffers * tiling.tile_kv * 2 * width * kv_itemsize
    by_token = (num_buffers + 1) * tiling.tile_kv * 3 * 4  # block ids, scales of keys and values
    operands = rows * (width + tiling.tile_kv) * itemsize  # queries and weights
    # Four warps together multiply 64 rows on sm_90a, and then more operands lie there.
    return buffers + by_token + operands * (2 if rows >= 64 and itemsize < 4 else 1)


# Tiles of prefill that compile without spilled registers (jax 0.10.2), all features together, by
# what they are for: tile_q, tile_kv, num_warps, num_stages. Widths are head dims, padded.
_PREFILL_AMPERE = {  # by width and whether the cache has 8 bits
    (64, False): (64, 64, 4, 5),
    (64, True): (64, 64, 4, 5),
    (128, False): (64, 32, 4, 5),
    (128, True): (64, 32, 8, 5),
    (256, False): (64, 32, 8, 5),
    (256, True): (32, 32, 4, 5),
}
_PREFILL_HOPPER = {
    (64, False): (128, 64, 8, 5),
    (64, True): (128, 64, 8, 5),
    (128, False): (128, 64, 8, 5),
    (128, True): (128, 64, 8, 5),
    (256, False): (128, 32, 8, 5),
    (256, True): (64, 32, 8, 5),
}
# float32 is multiplied number by number: tensor cores would round it to 11 bits. The last tiling
# has no registers left to read ahead.
_PREFILL_FLOAT32 = {  # by width and whether the cache is of another type
    (64, False): (64, 16, 8, 2),
    (64, True): (16, 16, 8, 2),
    (128, False): (64, 16, 8, 2),
    (128, True): (16, 16, 8, 2),
    (256, False): (32, 16, 8, 2),
    (256, True): (32, 16, 8, 1),
}


def prefill_tiling(
    *, head_dim: int, group: int, itemsize: int, kv_itemsize: int, gpu: Gpu
) -> PrefillTiling:
    """The tiling of a prefill; it depends on nothing that changes from step to step.

    Args:
        head_dim: C.
        group: query heads of a KV head.
        itemsize: bytes of the type that queries, keys and values are multiplied in.
        kv_itemsize: bytes of a number in the cache.
        gpu: where it is to run.
    """
    width = power_of_two(head_dim, 64)
    if itemsize == 4:
        chosen = _PREFILL_FLOAT32[width, kv_itemsize < 4]
    else:
        chosen = (_PREFILL_HOPPER if _has_wgmma(gpu) else _PREFILL_AMPERE)[width, kv_itemsize == 1]
    tile_q, tile_kv, num_warps, num_stages = chosen
    tiling = PrefillTiling(
        tile_q=power_of_two(group, tile_q),
        tile_kv=tile_kv,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    is_padded = num_warps == 4 and 64 < head_dim < 128  # which takes registers
    if is_padded or prefill_shared_memory(tiling, width, itemsize, gpu) > gpu.shared_memory:
        return replace(tiling, num_stages=2)
    return tiling


def check_prefill(
    tiling: PrefillTiling, *, width: int, group: int, itemsize: int, gpu: Gpu
) -> None:
    """Raises `ValueError` where no query fits a tile, or the tiles not the shared memory."""
    if tiling.tile_q < group:
        raise ValueError(
            f"tile_q={tiling.tile_q} has no room for a query with the {group} heads of its group; "
            f"take {power_of_two(group)} or more"
        )
    check_shared_memory(
        f"paged_prefill with {tiling} at a width of {width} in {itemsize} bytes",
        prefill_shared_memory(tiling, width, itemsize, gpu),
        gpu,
        "take a smaller tile_kv or tile_q, or num_stages below 5",
    )


def prefill_shared_memory(tiling: PrefillTiling, width: int, itemsize: int, gpu: Gpu) -> int:
    """Bytes of one program: queries, weights, and keys and values, twice if fetched ahead.

    For Hopper's products once more.
    """
    fetched_ahead = 2 if tiling.num_stages >= 5 else 0
    for_wgmma = 2 if _has_wgmma(gpu) and itemsize == 2 else 0
    vectors = tiling.tile_q + (2 + fetched_ahead + for_wgmma) * tiling.tile_kv
    block_ids_and_scales = KIB
    return (vectors * width + tiling.tile_q * tiling.tile_kv) * itemsize + block_ids_and_scales


def _has_wgmma(gpu: Gpu) -> bool:
    """Hopper's products of four warps; what came later is taken to be like it."""
    return gpu.shared_memory >= 227 * KIB


def check_shared_memory(what: str, num_bytes: int, gpu: Gpu, way_out: str) -> None:
    """Says no before the launch, where the GPU's driver would say it with less to go by.

    Args:
        what: the kernel and its tiling, for the message.
        num_bytes: the shared memory of one program, estimated.
        way_out: what to change.

    Raises:
        ValueError: the program takes more shared memory than `gpu` gives one.
    """
    if num_bytes > gpu.shared_memory:
        raise ValueError(
            f"{what} takes about {num_bytes} bytes of shared memory, and {gpu.kind!r} gives a "
            f"program {gpu.shared_memory}; {way_out}"
        )


def _check_powers_of_two(**tiles: int) -> None:
    for name, tile in tiles.items():
        if tile < MIN_TILE or tile & (tile - 1):
            raise ValueError(
                f"{name}={tile} must be a power of two, {MIN_TILE} or more; "
                f"{power_of_two(max(tile, 1))} is the next"
            )


def _check_positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count} must be 1 or more")
