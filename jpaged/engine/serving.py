"""From a model and a configuration to an engine that can run: load, lay out, size the pool."""

import dataclasses
import logging
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpaged import loading
from jpaged.config import EngineConfig, ModelConfig
from jpaged.core.state import EngineState
from jpaged.engine import capacity, compiled, implementation, weights
from jpaged.engine.engine import Engine
from jpaged.engine.program_memory import program_bytes
from jpaged.engine.rules import rule_sizes
from jpaged.errors import ConfigError
from jpaged.kv_format import full_name
from jpaged.models.forward import make_forward
from jpaged.models.prepare import param_bytes
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
    is_dummy = config.load_format == "dummy"
    if is_dummy and params is not None:
        raise ConfigError(
            'load_format="dummy" draws weights at random, and params are given; leave out the one '
            "or the other"
        )
    model = resolve_model(source, needs_weights=not is_dummy)
    device = jax.devices()[0]
    config = implementation.resolve(
        config.resolved(model, device.platform), device=device, head_dim=model.head_dim
    )
    is_gguf = (
        isinstance(source, str | Path)
        and loading.find_checkpoint(source, needs_weights=not is_dummy).kind == "gguf"
    )
    if config.quantization == "gguf" and not is_gguf:
        raise ConfigError(
            'quantization="gguf" serves the numbers of a GGUF file, which this model is not; '
            "choose int8 or int4"
        )
    dtype = loading.resolve_dtype(config.dtype, model.dtype, is_gguf)
    kv_name = full_name(config.cache.kv_cache_dtype, dtype)
    config = dataclasses.replace(
        config, cache=dataclasses.replace(config.cache, kv_cache_dtype=kv_name)
    )
    # What a GPU has left is known only with the weights in place.
    pool = capacity.fit_pool(config, model, dtype, device) if device.platform == "cpu" else None
    started = time.perf_counter()
    if is_dummy:
        serving = weights.draw(model, config, dtype)
    elif params is None:
        assert isinstance(source, str | Path)
        serving = weights.load(source, model, config, dtype)
    else:
        serving = weights.take(params, model, config, dtype)
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
        "Model loading took %.2f s; weights are %d bytes in %s%s on %s, kernels are %s",
        time.perf_counter() - started,
        param_bytes(serving),
        dtype,
        f" and {config.quantization} numbers" if config.quantization else "",
        device.device_kind,
        implementation.describe(config, device),
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
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "implementation": config.implementation,
    }


def resolve_model(source: ModelSource, *, needs_weights: bool = True) -> ModelConfig:
    """The model's config, from wherever it is told; needs_weights: as `loading.find_checkpoint`."""
    if isinstance(source, ModelConfig):
        return source
    if isinstance(source, Mapping):
        return ModelConfig.from_hf(dict(source))
    return ModelConfig.from_hf(loading.load_hf_config(source, needs_weights=needs_weights))


def _log_capacity(num_blocks: int, config: EngineConfig, model: ModelConfig) -> None:
    num_tokens = capacity.kv_cache_tokens(num_blocks, config, model)
    logger.info("KV cache size: %s tokens in %s", f"{num_tokens:,}", config.cache.kv_cache_dtype)
    logger.info(
        "Maximum concurrency for %s tokens per request: %.2fx",
        f"{config.max_model_len:,}",
        capacity.max_concurrency(num_blocks, config, model),
    )
