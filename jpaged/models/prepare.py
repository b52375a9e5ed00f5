"""From the canonical tree of parameters to the one the engine runs.

Pure and jittable. What serving wants and training does not: the projections of one input fused into
one product, matrices as `[in, out]`, an LM head of its own for tied models, the serving dtype.
"""

import functools as ft
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jpaged.model_config import ModelConfig
from jpaged.ops.packed import pack
from jpaged.typing import Array, Params

Fuse = Callable[..., dict[str, Any]]

FUSED = {
    "self_attn": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)},
    "mlp": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
}


def prepare(
    params: Params,
    config: ModelConfig,
    dtype: DTypeLike,
    head_dtype: DTypeLike | None = None,
    *,
    implementation: str = "xla",
) -> dict[str, Any]:
    """The serving tree of `params`, which are left as they are.

    head_dtype: of the LM head alone, if it is not `dtype`.
    implementation: of the products; "native" packs their matrices, which no other can read.
    """
    fuse = ft.partial(_fuse, is_packed=implementation == "native")
    decoder = params["model"]
    head = decoder["embed_tokens"] if config.tied else params["lm_head"]
    serving = {
        "model": {
            **decoder,
            "layers": {i: _fuse_layer(layer, fuse) for i, layer in decoder["layers"].items()},
        },
    }
    serving = jax.tree.map(lambda x: x.astype(dtype), serving)
    head = jax.tree.map(lambda x: x.astype(head_dtype or dtype), head)
    serving["lm_head"] = fuse(head)
    table = serving["model"]["embed_tokens"]["weight"]
    if table.dtype.itemsize == 2:
        # A CPU would convert a 16-bit table to float32 as a whole each time it reads a row.
        bits = lax.bitcast_convert_type(table, jnp.uint16)
        serving["model"]["embed_tokens"] = {"weight": bits}
    return serving


def param_bytes(params: Params) -> int:
    """Bytes of a tree of parameters, real or abstract."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(params))


def _fuse_layer(layer: Params, fuse: Fuse) -> dict[str, Any]:
    fused = {name: _fuse_block(layer[name], table, fuse) for name, table in FUSED.items()}
    return {**layer, **fused}


def _fuse_block(block: Params, table: Mapping[str, tuple[str, ...]], fuse: Fuse) -> dict[str, Any]:
    parts = {part for names in table.values() for part in names}
    norms = {name: value for name, value in block.items() if name not in parts}
    return {**norms, **{new: fuse(*(block[part] for part in old)) for new, old in table.items()}}


def _fuse(*parts: Mapping[str, Array], is_packed: bool) -> dict[str, Any]:
    """Linears of one input, `[out, in]`, as one `[in, out]`, its outputs in their order."""
    weight = jnp.concatenate([part["weight"] for part in parts]).T
    fused: dict[str, Any] = {"weight": pack(weight) if is_packed else weight}
    if "bias" in parts[0]:
        fused["bias"] = jnp.concatenate([part["bias"] for part in parts])
    return fused
