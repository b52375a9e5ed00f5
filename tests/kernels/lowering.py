"""Programs for CUDA as text, made on any machine."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

A100 = "NVIDIA A100-SXM4-80GB"
# Since 0.11 JAX asks what device kernels are for, and finds none here.
ASKS_DEVICE = jax.__version_info__ >= (0, 11)


def lower(
    function: Callable[..., Any], *args: Any, donated: tuple[int, ...] = (), device_kind: str = A100
) -> str:
    """The program of a call. Before 0.11 it is for an H100, in tiles for an A100."""
    with contextlib.ExitStack() as stack:
        if ASKS_DEVICE:
            device = jax.sharding.AbstractDevice(
                device_kind=device_kind, num_cores=None, platform="gpu"
            )
            mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        jitted = jax.jit(function, donate_argnums=donated)
        return jitted.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
