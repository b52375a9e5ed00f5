"""Others' attention on the same arrays, where it is installed and can do the case.

Each gives the seconds of a call. What a rival can not do, or is not here to do, raises.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from gpu.attention_cases import BLOCK_SIZE, Arrays, Case, dense
from gpu.measuring import Effort, seconds_per_call

from jpaged.ops.kv_cache import LayerKV
from jpaged.ops.paged_attention import paged_attention

Rival = Callable[[Case, Arrays, Effort], float]


def rivals_of(case: Case) -> Iterator[tuple[str, Rival]]:
    """Those that can do a case, by name."""
    yield "jpaged, XLA", xla
    if not case.is_plain:
        return
    if case.is_decode:
        yield "jax paged_attention", jax_paged
        yield "dot_product_attention", jax_dense
        yield "torch SDPA", torch_sdpa
    elif case.is_fresh:
        yield "dot_product_attention", jax_dense
        yield "torch SDPA", torch_sdpa
        yield "torch flex_attention", torch_flex


def xla(case: Case, arrays: Arrays, effort: Effort) -> float:
    """jpaged's own form without kernels."""
    kv = LayerKV(
        k=arrays.k,
        v=arrays.v,
        dtype=case.kv_dtype,
        k_scale=arrays.k_scale,
        v_scale=arrays.v_scale,
    )

    def attend(q: jax.Array, kv: LayerKV, arrays: Arrays) -> jax.Array:
        return paged_attention(
            q,
            kv,
            block_table=arrays.block_table,
            context_lens=arrays.context_lens,
            query_start_loc=arrays.query_start_loc,
            num_decode_rows=len(case.rows) if case.is_decode else 0,
            scale=case.head_dim**-0.5,
            window=case.window,
            soft_cap=None,
        )

    return seconds_per_call(attend, arrays.q, kv, arrays, effort=effort)


def jax_paged(case: Case, arrays: Arrays, effort: Effort) -> float:
    """`jax.experimental.pallas.ops.gpu.paged_attention`: one query per row, as many splits as it
    takes by default or, for fewer blocks, as divide them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import paged_attention as op

    blocks_per_row = case.rows[0][0] // BLOCK_SIZE
    at_once = 128 // BLOCK_SIZE if blocks_per_row % (16 * 128 // BLOCK_SIZE) == 0 else 1
    splits = 16 if blocks_per_row % (16 * at_once) == 0 else 1
    pools = tuple(x.transpose(2, 0, 1, 3) for x in (arrays.k, arrays.v))  # [K N S C]

    def attend(q: jax.Array, pools: Any, arrays: Arrays) -> jax.Array:
        return op.paged_attention(
            q,
            *pools,
            arrays.block_table,
            arrays.context_lens,
            pages_per_compute_block=at_once,
            k_splits=splits,
            interpret=effort.interpret,
        )

    return seconds_per_call(attend, arrays.q, pools, arrays, effort=effort)


def jax_dense(case: Case, arrays: Arrays, effort: Effort) -> float:
    """`jax.nn.dot_product_attention`, by cuDNN on a GPU, over keys without pages."""
    k, v = dense(case, arrays)
    T, H, C = arrays.q.shape
    implementation = "xla" if effort.interpret else "cudnn"

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=not case.is_decode, implementation=implementation
        )

    B = len(case.rows)
    return seconds_per_call(attend, arrays.q.reshape(B, T // B, H, C), k, v, effort=effort)


def torch_sdpa(case: Case, arrays: Arrays, effort: Effort) -> float:
    """torch's `scaled_dot_product_attention`, the backend of its choice."""
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = _torch_arrays(case, arrays)
    options = {"is_causal": not case.is_decode, "enable_gqa": case.num_heads != case.num_kv_heads}
    return _torch_seconds(lambda: scaled_dot_product_attention(q, k, v, **options), effort)


def torch_flex(case: Case, arrays: Arrays, effort: Effort) -> float:
    """torch's compiled `flex_attention`, causal; as it is, uncompiled, where there is no GPU."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = _torch_arrays(case, arrays)
    P = case.rows[0][0]
    mask = create_block_mask(_is_causal, None, None, P, P, device=str(q.device))
    attend = flex_attention if effort.interpret else torch.compile(flex_attention)
    is_grouped = case.num_heads != case.num_kv_heads
    return _torch_seconds(lambda: attend(q, k, v, block_mask=mask, enable_gqa=is_grouped), effort)


def _is_causal(row: Any, head: Any, query: Any, key: Any) -> Any:
    del row, head
    return query >= key


def _torch_arrays(case: Case, arrays: Arrays) -> list[Any]:
    """q, k, v as torch has them, [B heads P C], on the GPU if there is one."""
    import torch

    on = "cpu" if jax.default_backend() == "cpu" else "cuda"
    q = arrays.q.reshape(len(case.rows), -1, *arrays.q.shape[1:])
    bits = [
        np.asarray(jax.lax.bitcast_convert_type(x, np.int16)) for x in (q, *dense(case, arrays))
    ]
    tensors = [torch.from_numpy(x.copy()).view(torch.bfloat16).to(on) for x in bits]
    return [x.transpose(1, 2).contiguous() for x in tensors]


def _torch_seconds(call: Callable[[], Any], effort: Effort) -> float:
    import torch

    wait = (lambda: None) if jax.default_backend() == "cpu" else torch.cuda.synchronize
    with torch.inference_mode():
        call()
        wait()
        seconds = []
        for _ in range(effort.rounds):
            start = time.perf_counter()
            for _ in range(effort.calls):
                call()
            wait()
            seconds.append((time.perf_counter() - start) / effort.calls)
    return statistics.median(seconds)
