"""From the canonical tree of parameters to the one the engine runs.

Pure and jittable. What serving wants and training does not: the projections of one input fused into
one product, matrices as `[in, out]`, an LM head of its own for tied models, the serving dtype.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jpaged.model_config import ModelConfig
from jpaged.typing import Array, Params

FUSED = {
    "self_attn": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)},
    "mlp": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
}


def prepare(
    params: Params, config: ModelConfig, dtype: DTypeLike, head_dtype: DTypeLike | None = None
) -> dict[str, Any]:
    """The serving tree of `params`, which are left as they are. head_dtype: of the LM head alone,
    if it is not `dtype`."""
    decoder = params["model"]
    head = decoder["embed_tokens"] if config.tied else params["lm_head"]
    serving = {
        "model": {
            **decoder,
            "layers": {i: _fuse_layer(layer) for i, layer in decoder["layers"].items()},
        },
    }
    serving = jax.tree.map(lambda x: x.astype(dtype), serving)
    serving["lm_head"] = jax.tree.map(lambda x: x.astype(head_dtype or dtype), _fuse(head))
    table = serving["model"]["embed_tokens"]["weight"]
    if table.dtype.itemsize == 2:
        # A CPU would convert a 16-bit table to float32 as a whole each time it reads a row.
        bits = lax.bitcast_convert_type(table, jnp.uint16)
        serving["model"]["embed_tokens"] = {"weight": bits}
    return serving


def param_bytes(params: Params) -> int:
    """Bytes of a tree of parameters, real or abstract."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(params))


def _fuse_layer(layer: Params) -> dict[str, Any]:
    return {**layer, **{block: _fuse_block(layer[block], table) for block, table in FUSED.items()}}


def _fuse_block(block: Params, table: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    parts = {part for names in table.values() for part in names}
    norms = {name: value for name, value in block.items() if name not in parts}
    return {**norms, **{new: _fuse(*(block[part] for part in old)) for new, old in table.items()}}


def _fuse(*parts: Mapping[str, Array]) -> dict[str, Array]:
    """Linears of one input, `[out, in]`, as one `[in, out]`, its outputs in their order."""
    fused = {"weight": jnp.concatenate([part["weight"] for part in parts]).T}
    if "bias" in parts[0]:
        fused["bias"] = jnp.concatenate([part["bias"] for part in parts])
    return fused
