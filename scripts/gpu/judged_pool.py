"""Writes and copies to be judged: to the bit, but for 8-bit codes, where a division may round."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_copy import block_copy
from pallas_kernels.checks import STORAGE
from pallas_kernels.kv_write import Pools, turn_and_write, write_kv
from tests.oracles import kv_write as oracle

N, S, K, H, T = 9, 16, 8, 32, 100


def judge_write(
    kv_dtype: str, scales: str | None, head_dim: int, turns: bool, interpret: bool
) -> tuple[Any, Any, Any]:
    """A step's tokens into pools of ones; with RoPE, the turned queries as well.

    Numbers are small multiples of 1/8 and angles of 1/16: in float32 nothing of it is rounded.
    """
    rng = np.random.default_rng(0)
    shape = (N, S, K, head_dim)
    k, v = (np.ones(shape, np.dtype(STORAGE[kv_dtype])) for _ in range(2))
    scale = {None: None, "one": np.float32(0.25), "each": np.ones(shape[:3], np.float32)}[scales]
    slots = rng.permutation(N * S)[:T].astype(np.int32)  # those of block 0 are padding
    new = [
        (rng.integers(-256, 257, (T, heads, head_dim)) / 8).astype(np.float32)
        for heads in (H, K, K)
    ]
    cos, sin = (
        (rng.integers(-16, 17, (T, head_dim // 2)) / 16).astype(np.float32) for _ in range(2)
    )
    q, k_new, v_new = new
    write = jax.jit(ft.partial(write_kv, kv_dtype=kv_dtype, interpret=interpret))
    turn = jax.jit(ft.partial(turn_and_write, kv_dtype=kv_dtype, interpret=interpret))
    pools = Pools(*jax.tree.map(jnp.asarray, (k, v)), scale, scale)
    got = turn(pools, *new, cos, sin, slots) if turns else (q, write(pools, k_new, v_new, slots))
    if turns:
        q, k_new = oracle.turn(q, cos, sin), oracle.turn(k_new, cos, sin)
    (k, k_scale), (v, v_scale) = (
        oracle.write(pool, scale, one, slots, kv_dtype) for pool, one in ((k, k_new), (v, v_new))
    )
    wanted = (q, Pools(k, v, k_scale, v_scale))
    step = 1 if scales == "each" else 0  # neighbouring codes
    bounds = Pools(step, step, *[None if scale is None else 1e-6] * 2)
    bound = (0, bounds)
    return *(jax.tree.map(np.asarray, x) for x in (got, wanted)), jax.tree.map(
        lambda x, one: np.full(np.shape(x), one), wanted, bound
    )


def judge_copy(kv_dtype: str, interpret: bool) -> tuple[Any, Any, Any]:
    """Blocks over others that are read themselves, a chain and a cycle among them."""
    rng = np.random.default_rng(0)
    pools = tuple(
        rng.integers(0, 100, shape).astype(dtype)
        for shape, dtype in (((N, S, K, 128), STORAGE[kv_dtype]), ((N, S, K), np.float32))
    )
    src, dst = np.array([1, 2, 3, 4, 0], np.int32), np.array([2, 3, 1, 5, 0], np.int32)
    copy = jax.jit(ft.partial(block_copy, interpret=interpret))
    got = copy(jax.tree.map(jnp.asarray, pools), src, dst)
    wanted = [pool.copy() for pool in pools]
    for pool, before in zip(wanted, pools, strict=True):
        pool[dst] = before[src]
    return list(got), wanted, [np.zeros(x.shape) for x in wanted]


def _cases() -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for kv_dtype, storage in STORAGE.items():
        is_8_bit = np.dtype(storage).itemsize == 1
        for scales in (None, "one", "each") if is_8_bit else (None,):
            what = f"{kv_dtype}, scales: {scales}" if is_8_bit else kv_dtype
            cases[f"write: {what}"] = ft.partial(judge_write, kv_dtype, scales, 128, False)
    for head_dim in (64, 80, 128):
        cases[f"write: RoPE, head dim {head_dim}"] = ft.partial(
            judge_write, "float32", None, head_dim, True
        )
    cases["write: RoPE, e4m3"] = ft.partial(judge_write, "float8_e4m3fn", "each", 128, True)
    for kv_dtype in ("bfloat16", "int8"):
        cases[f"copy: {kv_dtype}"] = ft.partial(judge_copy, kv_dtype)
    return cases


POOL = _cases()
