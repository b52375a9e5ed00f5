"""Which implementation of its kernels an engine runs: decided once, when it starts, and logged."""

import dataclasses
import logging

from jpaged.config import EngineConfig
from jpaged.engine import compiled
from jpaged.errors import ConfigError, NativeUnavailableError
from jpaged.native import library

logger = logging.getLogger(__name__)


def resolve(config: EngineConfig) -> EngineConfig:
    """The same with an implementation that runs here: the native kernels are loaded, or not meant.

    Raises ConfigError, with the reason, if "native" is asked for and can not be had.
    """
    if config.implementation == "xla":
        return config
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
