"""How many blocks the pool gets, and how many requests that serves: vLLM's arithmetic."""

import os
from typing import Any

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.model_config import ModelConfig
from jpaged.ops.kv_cache import layer_kv_bytes

_GIB = 2**30


def blocks_per_request(config: EngineConfig) -> int:
    """M: blocks that hold one request of max_model_len tokens."""
    assert config.max_model_len is not None
    return _ceil(config.max_model_len, config.cache.block_size)


def max_blocks_per_request(config: EngineConfig, model: ModelConfig) -> int:
    """Most blocks that a request of max_model_len tokens holds at a time, vLLM's formula.

    All of M, unless every layer has a window: then blocks behind the widest one are given back, and
    what is left is the window before a step's first token, and the tokens of the largest step.
    One window of decoding steps is such a step too.
    """
    M = blocks_per_request(config)
    windows = [layer.window for layer in model.layers if layer.window is not None]
    if len(windows) < model.num_layers:
        return M
    assert config.max_num_batched_tokens is not None
    num_new = max(config.max_num_batched_tokens, config.num_decode_steps)
    # One more: the span may begin anywhere in its first block.
    return min(M, _ceil(max(windows) - 1 + num_new, config.cache.block_size) + 1)


def block_bytes(config: EngineConfig, model: ModelConfig, dtype: str) -> int:
    """Bytes of one block in all layers, K and V."""
    one_layer = layer_kv_bytes(
        1, config.cache.block_size, model.num_kv_heads, model.head_dim, dtype
    )
    return one_layer * model.num_layers


def choose_num_blocks(config: EngineConfig, model: ModelConfig, dtype: str, device: Any) -> int:
    """N, the null block included, for a `jax.Device`.

    An override is taken as it is: requests that do not fit are refused one by one. Otherwise raises
    ConfigError if not even one request of max_model_len tokens fits: the bytes needed and
    available, the longest context that would fit, and what to turn.
    """
    cache, most = config.cache, max_blocks_per_request(config, model)
    per_block = block_bytes(config, model, dtype)
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        num_blocks = cache.kv_cache_memory_bytes // per_block
    else:
        budget = (
            _cpu_budget(config) if device.platform == "cpu" else _gpu_budget(config, model, device)
        )
        assert config.max_num_seqs is not None
        num_blocks = min(budget // per_block, config.max_num_seqs * most + 1)
        if (
            device.platform == "cpu" and num_blocks < most + 1
        ):  # one request, if half the memory does
            num_blocks = min(_total_memory() // 2 // per_block, most + 1)
    if num_blocks < most + 1:
        raise ConfigError(_too_small(config, model, num_blocks, per_block))
    return num_blocks


def max_concurrency(num_blocks: int, config: EngineConfig, model: ModelConfig) -> float:
    """Requests of max_model_len tokens that the pool holds at once, as vLLM reports it."""
    return num_blocks / max_blocks_per_request(config, model)


def kv_cache_tokens(num_blocks: int, config: EngineConfig, model: ModelConfig) -> int:
    """The pool's size in tokens, as vLLM reports it."""
    assert config.max_model_len is not None
    return int(max_concurrency(num_blocks, config, model) * config.max_model_len)


def _ceil(amount: int, unit: int) -> int:
    return -(-amount // unit)


def _cpu_budget(config: EngineConfig) -> int:
    return int(config.cache.cpu_memory_share * _total_memory())


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpu_budget(config: EngineConfig, model: ModelConfig, device: Any) -> int:
    """What utilization leaves after the weights and one step's activations."""
    stats = device.memory_stats() or {}
    limit, in_use = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
    tokens, num_seqs = config.max_num_batched_tokens or 0, config.max_num_seqs or 0
    width = 4 * model.hidden_size + 3 * model.intermediate_size
    activations = 4 * (tokens * width + 3 * num_seqs * model.vocab_size)
    return int(limit * config.cache.gpu_memory_utilization) - in_use - activations


def _too_small(config: EngineConfig, model: ModelConfig, num_blocks: int, per_block: int) -> str:
    longest = max(num_blocks - 1, 0) * config.cache.block_size
    needed = (max_blocks_per_request(config, model) + 1) * per_block / _GIB
    return (
        f"one request of max_model_len={config.max_model_len} tokens needs {needed:.3f} GiB of KV "
        f"cache, and the pool has {max(num_blocks, 0) * per_block / _GIB:.3f} GiB ({num_blocks} "
        f"blocks); lower max_model_len to at most {longest}, or give the pool more: "
        "kv_cache_memory_bytes, num_gpu_blocks_override or gpu_memory_utilization"
    )
