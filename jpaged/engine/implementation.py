"""Which implementation of its kernels an engine runs: decided once, when it starts, and logged."""

import dataclasses
import logging
from typing import Any

from jpaged.config import EngineConfig
from jpaged.engine import compiled
from jpaged.errors import ConfigError, NativeUnavailableError
from jpaged.native import library
from pallas_kernels.checks import MAX_HEAD_DIM

logger = logging.getLogger(__name__)

MIN_COMPUTE_CAPABILITY = 8.0  # of the GPUs that the kernels are compiled for: A100 and later


def resolve(config: EngineConfig, *, device: Any, head_dim: int | None = None) -> EngineConfig:
    """The same with an implementation that runs on the device.

    On a CPU the native kernels are loaded, unless others are asked for.

    device: a `jax.Device`. head_dim: the model's; None: one that every implementation has.

    Raises ConfigError, with the reason, if the one that is asked for can not be had.
    """
    if config.implementation == "xla":
        return config
    if config.implementation == "pallas" or device.platform != "cpu":
        return _resolve_pallas(config, device, head_dim)
    return _resolve_native(config)


def describe(config: EngineConfig, device: Any) -> str:
    """The implementation for the log: what runs otherwise, and how if that is not as it should."""
    if config.implementation == "pallas" and device.platform == "cpu":
        return "pallas, interpreted"
    if config.attention_implementation != config.implementation:
        return f"{config.implementation}, of attention {config.attention_implementation}"
    return config.implementation


def _resolve_pallas(config: EngineConfig, device: Any, head_dim: int | None) -> EngineConfig:
    reason = _why_no_kernels(device, head_dim)
    if reason is None:
        return dataclasses.replace(config, implementation="pallas")
    if config.implementation == "pallas":
        raise ConfigError(f'implementation="pallas" can not be had: {reason}; choose auto or xla')
    logger.warning("Kernels are XLA programs, for want of Pallas ones: %s", reason)
    return dataclasses.replace(config, implementation="xla")


def _why_no_kernels(device: Any, head_dim: int | None) -> str | None:
    if head_dim is not None and head_dim > MAX_HEAD_DIM:
        return f"the model's head dim {head_dim} is above {MAX_HEAD_DIM}"
    if device.platform == "cpu":  # interpreted
        return None
    if "cuda" not in device.client.platform_version.lower():
        return f"{device.device_kind} is no NVIDIA GPU"
    if float(device.compute_capability) < MIN_COMPUTE_CAPABILITY:
        return (
            f"{device.device_kind} has compute capability {device.compute_capability}, below "
            f"{MIN_COMPUTE_CAPABILITY}"
        )
    return None


def _resolve_native(config: EngineConfig) -> EngineConfig:
    try:
        library.load(compiled.native_folder(config.compilation_cache_dir))
    except NativeUnavailableError as reason:
        if config.implementation == "native":
            raise ConfigError(
                f'implementation="native" can not be had: {reason}; choose auto or xla'
            ) from reason
        logger.warning("Kernels are XLA programs, for want of native ones: %s", reason)
        return dataclasses.replace(config, implementation="xla")
    if config.has_8_bit_kv:
        logger.info(
            "Attention is an XLA program: the native one reads no KV of 8 bits (kv_cache_dtype=%s)",
            config.cache.kv_cache_dtype,
        )
    return dataclasses.replace(config, implementation="native")
