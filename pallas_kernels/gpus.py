"""GPUs that kernels are compiled for, by the names that JAX has for them."""

from dataclasses import dataclass

import jax

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
