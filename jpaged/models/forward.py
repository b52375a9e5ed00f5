"""Models as pure functions of their parameters: `Forward` for the engine, dense for training."""

import functools as ft
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jpaged.core.batch import Batch, Forward, KVCache
from jpaged.model_config import ModelConfig
from jpaged.models.attend import dense_attend, paged_attend
from jpaged.models.llama import CausalLM, Linear, Norm
from jpaged.models.registry import abstract_model, abstract_params
from jpaged.typing import Array, Float, Int, Params


def bind(
    config: ModelConfig, params: Params, *, fused: bool, row_invariant: bool = False
) -> CausalLM:
    """The module of a tree of parameters, real or traced.

    row_invariant: a token's result has the same bits among any number of others.
    """
    graphdef, _ = abstract_model(config, fused=fused)
    model = nnx.merge(graphdef, params)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear | Norm):
            module.row_invariant = row_invariant
    return model


@ft.lru_cache(maxsize=16)
def make_forward(
    config: ModelConfig, *, deterministic: bool = False, implementation: str = "xla"
) -> Forward:
    """The engine's `Forward` over the serving tree. Equal arguments give the same object.

    deterministic: a token's hidden state and logits have the same bits in any batch.
    implementation: of attention, as in `paged_attention`.
    """

    def hidden(params: Params, batch: Batch, kv: KVCache) -> tuple[Float[Array, "T D"], KVCache]:
        model = bind(config, params, fused=True, row_invariant=deterministic)
        attend = paged_attend(batch, deterministic=deterministic, implementation=implementation)
        lengths = jnp.maximum(batch.prompt_lens[batch.token_rows], batch.positions + 1)
        is_token = batch.slot_mapping != 0
        out, new_kv = model.model(batch.token_ids, batch.positions, lengths, kv, attend, is_token)
        return out, cast(KVCache, new_kv)

    def logits(params: Params, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        return bind(config, params, fused=True, row_invariant=deterministic).logits(hidden)

    return Forward(hidden, logits, config.widest_window)


@ft.lru_cache(maxsize=16)
def dense_forward(
    config: ModelConfig, *, fused: bool = False
) -> Callable[[Params, Int[Array, " T"]], Float[Array, "T V"]]:
    """(params, token_ids) -> float32 logits after each token of one whole sequence.

    For training and as the engine's reference: no KV cache, differentiable; `vmap` over token_ids
    for a batch. Takes the canonical tree, or with `fused` the serving tree.
    """

    def forward(params: Params, token_ids: Int[Array, " T"]) -> Float[Array, "T V"]:
        model = bind(config, params, fused=fused)
        positions = jnp.arange(len(token_ids))
        lengths = jnp.full_like(positions, len(token_ids))
        no_kv = (None,) * config.num_layers
        hidden, _ = model.model(token_ids, positions, lengths, no_kv, dense_attend)
        return model.logits(hidden)

    return forward


def init_params(config: ModelConfig, key: jax.Array, dtype: DTypeLike) -> dict[str, Any]:
    """A random canonical tree: matrices N(0, 0.02), norms that multiply by one, zero biases."""
    return init_part(config, abstract_params(config, dtype), key)


def init_part(config: ModelConfig, part: Params, key: jax.Array) -> dict[str, Any]:
    """`init_params` of a part of the abstract canonical tree."""
    leaves, treedef = jax.tree.flatten_with_path(part)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        treedef,
        [
            _init_leaf(config, path[-1].key, leaf, k)
            for (path, leaf), k in zip(leaves, keys, strict=True)
        ],
    )


def _init_leaf(
    config: ModelConfig, name: str, leaf: jax.ShapeDtypeStruct, key: jax.Array
) -> jax.Array:
    if leaf.ndim == 2:
        return (0.02 * jax.random.normal(key, leaf.shape, jnp.float32)).astype(leaf.dtype)
    is_one = name == "weight" and not config.norm_offset
    return jnp.full(leaf.shape, 1.0 if is_one else 0.0, leaf.dtype)
