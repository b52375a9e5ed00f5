"""Tiles of the kernels: their choice by device, type and shape, and the shared memory they take.

Owns what is known of GPUs. Nothing is tuned at run time: `scripts/tune_kernels.py` measures, and
what it finds is written here. Knows nothing of what the kernels compute.
"""

from dataclasses import dataclass

import jax

MIN_TILE = 16  # the least a tensor core takes along any side
KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What a kernel's tiles depend on."""

    kind: str  # as JAX names the device
    num_sms: int  # streaming multiprocessors
    shared_memory: int  # bytes one program may take


# Streaming multiprocessors and the most shared memory of a program, from NVIDIA's data sheets and
# the table of compute capabilities in the CUDA C++ programming guide. The first name found counts.
_GPUS = (
    ("A100", 108, 163),
    ("A30", 56, 163),
    ("A800", 108, 163),
    ("GH200", 132, 227),
    ("H100", 132, 227),
    ("H200", 132, 227),
    ("H20", 78, 227),
    ("H800", 132, 227),
    ("B200", 148, 227),
    ("B300", 148, 227),
    ("A10", 72, 99),
    ("A40", 84, 99),
    ("A6000", 84, 99),
    ("L40", 142, 99),
    ("L4", 58, 99),
    ("RTX", 128, 99),
)


def gpu_of(kind: str, num_cores: int | None = None) -> Gpu:
    """The GPU of that kind; one that is unknown has an A100's limits.

    `num_cores`, where the device tells it, goes before the table's number.
    """
    _, num_sms, shared_kib = next((row for row in _GPUS if row[0] in kind), _GPUS[0])
    return Gpu(kind=kind, num_sms=num_cores or num_sms, shared_memory=shared_kib * KIB)


def current_gpu() -> Gpu:
    """The GPU that is compiled for: the mesh's device, or else the first one of JAX's backend.

    On a CPU, where kernels are interpreted, the limits of an A100.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return gpu_of(device.device_kind, device.num_cores)
    device = jax.devices()[0]
    num_cores = getattr(device, "core_count", None) if device.platform == "gpu" else None
    return gpu_of(device.device_kind, num_cores)


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


def power_of_two(size: int, at_least: int = MIN_TILE) -> int:
    """The least power of two that holds `size`, and no less than `at_least`, a power of two."""
    return max(at_least, 1 << (size - 1).bit_length())


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
