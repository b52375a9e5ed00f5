"""From a model and a configuration to an engine that can run: load, lay out, size the pool."""

import logging
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged import loading
from jpaged.config import EngineConfig, ModelConfig
from jpaged.core.state import EngineState
from jpaged.engine import capacity, compiled, implementation
from jpaged.engine.engine import Engine
from jpaged.engine.program_memory import program_bytes
from jpaged.engine.rules import rule_sizes
from jpaged.errors import ConfigError
from jpaged.models.forward import make_forward
from jpaged.models.prepare import param_bytes
from jpaged.models.registry import abstract_params
from jpaged.typing import Params

logger = logging.getLogger(__name__)

ModelSource = str | Path | ModelConfig | Mapping[str, Any]


def make_engine(
    source: ModelSource, params: Params | None, config: EngineConfig
) -> tuple[Engine, ModelConfig, str]:
    """Loads what `source` names, or takes the given canonical `params`, and starts an engine.

    Returns the engine, the model's config and the dtype it runs in. Raises ConfigError and
    CheckpointError.
    """
    model = resolve_model(source)
    device = jax.devices()[0]
    config = implementation.resolve(config.resolved(model, device.platform))
    dtype = _resolve_dtype(source, model, config)
    # What a GPU has left is known only with the weights in place.
    pool = capacity.fit_pool(config, model, dtype, device) if device.platform == "cpu" else None
    started = time.perf_counter()
    if params is None:
        assert isinstance(source, str | Path)
        params = loading.load_params(source, model, dtype, head_dtype=config.head_dtype_for(dtype))
    serving = prepare_params(params, model, dtype, config)
    del params
    hash_key = np.frombuffer(secrets.token_bytes(16), np.uint32)
    forward = make_forward(
        model, deterministic=config.deterministic, implementation=config.implementation
    )

    def measure(config: EngineConfig, num_blocks: int) -> int | None:
        sizes = _state_sizes(config, model, dtype, num_blocks)
        return program_bytes(
            forward, serving, compiled.empty_state.eval_shape(hash_key, **sizes), config
        )

    config, num_blocks = pool or capacity.fit_pool(
        config, model, dtype, device, measure, compiled.memory_fraction()
    )
    sizes = _state_sizes(config, model, dtype, num_blocks)

    def make_state() -> EngineState:
        return compiled.empty_state(hash_key, **sizes)

    engine = Engine(forward, serving, config, make_state, model.vocab_size)
    logger.info(
        "Model loading took %.2f s; weights are %d bytes in %s on %s, kernels are %s",
        time.perf_counter() - started,
        param_bytes(serving),
        dtype,
        device.device_kind,
        config.implementation,
    )
    _log_capacity(num_blocks, config, model)
    return engine, model, dtype


def _state_sizes(
    config: EngineConfig, model: ModelConfig, dtype: str, num_blocks: int
) -> dict[str, Any]:
    """The options of `compiled.empty_state`."""
    return {
        "model": model,
        "dtype": dtype,
        "num_rows": config.max_num_seqs,
        "num_blocks": num_blocks,
        "block_size": config.cache.block_size,
        "max_blocks_per_row": capacity.blocks_per_request(config),
        "rule_sizes": rule_sizes(config, model.vocab_size),
        "processors": tuple(config.logits_processors),
        "is_cpu": jax.default_backend() == "cpu",
    }


def resolve_model(source: ModelSource) -> ModelConfig:
    """The model's config, from wherever it is told."""
    if isinstance(source, ModelConfig):
        return source
    if isinstance(source, Mapping):
        return ModelConfig.from_hf(dict(source))
    return ModelConfig.from_hf(loading.load_hf_config(source))


def _resolve_dtype(source: ModelSource, model: ModelConfig, config: EngineConfig) -> str:
    is_gguf = isinstance(source, str | Path) and loading.find_checkpoint(source).kind == "gguf"
    return loading.resolve_dtype(config.dtype, model.dtype, is_gguf)


def prepare_params(params: Params, model: ModelConfig, dtype: str, config: EngineConfig) -> Params:
    """The serving tree of a canonical tree: copies, which the caller's own donations can not hurt.

    config: resolved.

    Raises ConfigError if the tree is not this model's: the names or shapes that differ.
    """
    expected = abstract_params(model, dtype)
    if jax.tree.structure(params) != jax.tree.structure(expected):
        raise ConfigError(f"params are not a tree of this model: {_difference(params, expected)}")
    for (path, got), want in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(expected), strict=True
    ):
        if jnp.shape(got) != want.shape:
            raise ConfigError(
                f"params{jax.tree_util.keystr(path)} has shape {jnp.shape(got)}, "
                f"the model needs {want.shape}"
            )
    return compiled.prepare_params(
        params,
        config=model,
        dtype=dtype,
        head_dtype=config.head_dtype_for(dtype),
        implementation=config.implementation,
    )


def _difference(params: Params, expected: Params) -> str:
    def names(tree: Params) -> set[str]:
        return {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)}

    missing, unknown = names(expected) - names(params), names(params) - names(expected)
    if not (missing or unknown):
        return "its names are right, its containers are not; give nested dicts of arrays"
    return f"missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}"


def _log_capacity(num_blocks: int, config: EngineConfig, model: ModelConfig) -> None:
    num_tokens = capacity.kv_cache_tokens(num_blocks, config, model)
    logger.info("KV cache size: %s tokens", f"{num_tokens:,}")
    logger.info(
        "Maximum concurrency for %s tokens per request: %.2fx",
        f"{config.max_model_len:,}",
        capacity.max_concurrency(num_blocks, config, model),
    )
