"""Part `pool`: new keys and values into their slots, and blocks copied; XLA's form beside it."""

import functools as ft
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu.measuring import Budget, Device, Effort, reason, seconds_per_call

from jpaged.ops.kv_cache import LayerKV, copy_blocks, init_layer_kv, kernel_pools, write_kv
from pallas_kernels import block_copy, kv_write

K, C, S = 8, 128, 16
# (what it is, logical type, scales as `init_layer_kv` names them)
_FORMATS = (
    ("bfloat16", "bfloat16", "none"),
    ("e4m3, one scale", "float8_e4m3fn", "tensor"),
    ("int8, scales", "int8", "token_head"),
)


def pool(device: Device, effort: Effort, budget: Budget) -> Iterator[dict[str, Any]]:
    """Writes of a step's tokens and copies of blocks: bound by launches, then by bandwidth."""
    num_blocks, tokens, copies = (9, (4,), (2,)) if effort.is_smoke else (8193, (64, 8192), (64,))
    for what, dtype, scales in _FORMATS[2:] if effort.is_smoke else _FORMATS:
        budget.check()
        kv = init_layer_kv(num_blocks, S, K, C, dtype, False, scales)
        itemsize = kv.k.dtype.itemsize
        for T in tokens:
            work = 2 * T * K * C * (2 + itemsize)
            yield _row(f"write {T} tokens, {what}", _writes(kv, T, effort), work, device, effort)
        for W in copies:
            work = 2 * W * S * K * C * itemsize * 2
            yield _row(f"copy {W} blocks, {what}", _copies(kv, W), work, device, effort)


def _row(
    case: str, forms: dict[str, tuple], work: int, device: Device, effort: Effort
) -> dict[str, Any]:
    """A row for the form of ours, the first, with the others' times held against it."""
    told: dict[str, Any] = {"case": case}
    seconds = {}
    for name, (step, carry, *args) in forms.items():
        try:
            seconds[name] = seconds_per_call(step, carry, *args, effort=effort)
        except Exception as error:  # the other form may run
            told[name] = reason(error)
    if "pallas" in seconds:
        told |= device.figures(seconds["pallas"], num_bytes=work)
        if "xla" in seconds:
            told["times_as_fast_as"] = {"xla": round(seconds["xla"] / seconds["pallas"], 3)}
    return told


def _writes(kv: LayerKV, T: int, effort: Effort) -> dict[str, tuple]:
    rng = np.random.default_rng(0)
    slots = S + rng.permutation((kv.k.shape[0] - 1) * S)[:T]
    new = jax.random.normal(jax.random.key(0), (2, T, K, C), jnp.bfloat16)
    args = (new[0], new[1], jnp.asarray(slots, jnp.int32))

    def by_kernel(pools: kv_write.Pools, *args: jax.Array) -> kv_write.Pools:
        return kv_write.write_kv(pools, *args, kv_dtype=kv.dtype, interpret=effort.interpret)

    pools = kv_write.Pools(*kernel_pools(kv), kv.k_scale, kv.v_scale)
    return {"pallas": (by_kernel, pools, *args), "xla": (write_kv, kv, *args)}


def _copies(kv: LayerKV, W: int) -> dict[str, tuple]:
    rng = np.random.default_rng(0)
    ids = jnp.asarray(1 + rng.permutation(kv.k.shape[0] - 1)[: 2 * W], jnp.int32)
    arrays = tuple(
        x for x in (*kernel_pools(kv), kv.k_scale, kv.v_scale) if x is not None and x.ndim
    )
    by_kernel = ft.partial(block_copy.block_copy, interpret=jax.default_backend() == "cpu")
    return {
        "pallas": (by_kernel, arrays, ids[:W], ids[W:]),
        "xla": (copy_blocks, kv, ids[:W], ids[W:]),
    }
