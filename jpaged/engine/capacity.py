"""How many blocks the pool gets, and how many requests that serves: vLLM's arithmetic."""

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.kv_format import kv_format
from jpaged.model_config import ModelConfig
from jpaged.ops.kv_cache import layer_kv_bytes
from pallas_kernels.checks import MAX_BYTES_OF_8_BITS, is_addressable

logger = logging.getLogger(__name__)

MeasureBytes = Callable[[EngineConfig, int], int | None]
"""(config, num_blocks) -> bytes the largest program needs for itself; None if nobody knows."""

_GIB = 2**30
_KEPT_BITS = 8  # of a measured pool's size: the others would differ from start to start
_KEPT_SHARE = 1 / 32  # of the pool that may stay unused, so that programs need no second compiling


def blocks_per_request(config: EngineConfig) -> int:
    """M: blocks that hold one request of max_model_len tokens."""
    assert isinstance(config.max_model_len, int), "not a resolved config"
    return _ceil(config.max_model_len, config.cache.block_size)


def max_blocks_per_request(config: EngineConfig, model: ModelConfig) -> int:
    """Most blocks that a request of max_model_len tokens holds at a time, vLLM's formula."""
    return most_blocks_held(config, model.widest_window)


def most_blocks_held(config: EngineConfig, window: int | None) -> int:
    """Most blocks that one row holds at a time.

    All of M, unless the model has a window: then blocks behind it are given back, and what is left
    is the window before a step's first token, and the tokens of the largest step. One window of
    decoding steps is such a step too.
    """
    M = blocks_per_request(config)
    if window is None:
        return M
    assert config.max_num_batched_tokens is not None
    num_new = max(config.max_num_batched_tokens, config.num_decode_steps)
    # One more: the span may begin anywhere in its first block.
    return min(M, _ceil(window - 1 + num_new, config.cache.block_size) + 1)


def most_blocks_taken(config: EngineConfig, window: int | None, num_cached: int) -> int:
    """Most blocks that a row holds at a time beyond those it keeps of `num_cached` tokens found in
    the prefix cache, whole blocks."""
    num_seen = num_cached if window is None else min(num_cached, window - 1)
    return most_blocks_held(config, window) - _ceil(num_seen, config.cache.block_size)


def longest_model_len(num_blocks: int, config: EngineConfig, model: ModelConfig) -> int:
    """The largest max_model_len of which a pool holds one request; 0 if it holds no token."""
    widest = dataclasses.replace(config, max_model_len=model.max_position)
    if max_blocks_per_request(widest, model) < num_blocks:
        return model.max_position
    return max(num_blocks - 1, 0) * config.cache.block_size


def block_bytes(config: EngineConfig, model: ModelConfig, dtype: str) -> int:
    """Bytes of one block in all layers, K and V, of a model that runs in `dtype`."""
    shape = (1, config.cache.block_size, model.num_kv_heads, model.head_dim)
    one_layer = layer_kv_bytes(*shape, *kv_format(config.cache.kv_cache_dtype, dtype))
    return one_layer * model.num_layers


def fit_pool(
    config: EngineConfig,
    model: ModelConfig,
    dtype: str,
    device: Any,
    measure: MeasureBytes | None = None,
    memory_fraction: float = 1.0,
) -> tuple[EngineConfig, int]:
    """The config with its max_model_len decided, and N, the null block included.

    dtype: the model's. device: a `jax.Device`; a GPU's counts what is in use by then, so the
        weights should be there.
    measure, memory_fraction: for a GPU, as in `_gpu_budget` and `_fit_gpu`.
    An override is taken as it is: requests that do not fit are refused one by one. Otherwise raises
    ConfigError if not even one request of max_model_len tokens fits: the bytes needed and
    available, the longest context that would fit, and what to turn.
    """
    is_auto, per_block = config.max_model_len == "auto", block_bytes(config, model, dtype)
    if is_auto:
        config = dataclasses.replace(config, max_model_len=model.max_position)
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        num_blocks = cache.num_gpu_blocks_override
    elif cache.kv_cache_memory_bytes is not None:
        num_blocks = cache.kv_cache_memory_bytes // per_block
    elif device.platform == "cpu":
        num_blocks = _fit_cpu(config, model, per_block, can_stretch=not is_auto)
    else:
        budget = _gpu_budget(config, device, memory_fraction)
        num_blocks = _fit_gpu(config, model, per_block, budget, measure)
    num_blocks = _addressable(num_blocks, config, model)
    if is_auto:
        longest = longest_model_len(num_blocks, config, model)
        config = dataclasses.replace(config, max_model_len=max(longest, 1))
        logger.info("max_model_len auto: %d tokens, of %d blocks", longest, num_blocks)
    is_enough = num_blocks > max_blocks_per_request(config, model)
    if not is_enough and cache.num_gpu_blocks_override is None:
        raise ConfigError(_too_small(config, model, num_blocks, per_block))
    return config, num_blocks


def max_concurrency(num_blocks: int, config: EngineConfig, model: ModelConfig) -> float:
    """Requests of max_model_len tokens that the pool holds at once, as vLLM reports it."""
    return num_blocks / max_blocks_per_request(config, model)


def kv_cache_tokens(num_blocks: int, config: EngineConfig, model: ModelConfig) -> int:
    """The pool's size in tokens, as vLLM reports it."""
    assert isinstance(config.max_model_len, int), "not a resolved config"
    return int(max_concurrency(num_blocks, config, model) * config.max_model_len)


def useful_blocks(config: EngineConfig, model: ModelConfig) -> int:
    """Blocks that all rows together can hold, and the null block: more would serve the prefix
    cache alone."""
    assert config.max_num_seqs is not None
    return config.max_num_seqs * max_blocks_per_request(config, model) + 1


def rows_bytes(config: EngineConfig) -> int:
    """Bytes of the rows' tokens and block tables, the null row's included."""
    assert config.max_num_seqs is not None
    M = blocks_per_request(config)
    return 4 * (config.max_num_seqs + 1) * (M * config.cache.block_size + M)


def estimated_activations(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of a step's activations on paper, on the safe side: the stream and the projections of
    every token, three arrays of logits for every row, and of quantized matrices the largest as the
    floats it stands for, all in float32."""
    assert config.max_num_batched_tokens is not None
    assert config.max_num_seqs is not None
    width = 4 * model.hidden_size + 3 * model.intermediate_size
    logits = 3 * config.max_num_seqs * model.vocab_size
    is_dequantized = config.quantization is not None and config.implementation != "native"
    widest = max(model.vocab_size, 2 * model.intermediate_size) if is_dequantized else 0
    floats = config.max_num_batched_tokens * width + logits + widest * model.hidden_size
    return 4 * floats


def blocks_in(num_bytes: int, per_block: int, num_layers: int) -> int:
    """Blocks for which a GPU's free bytes suffice, one array of the pool left free.

    Where a layer's weights were converted lies a hole. The pool's arrays fill it up to less than
    one of them, and a program needs its bytes in one piece.
    """
    num_arrays = 2 * num_layers
    return max(num_bytes, 0) * num_arrays // (num_arrays + 1) // per_block


def _ceil(amount: int, unit: int) -> int:
    return -(-amount // unit)


def _fit_cpu(config: EngineConfig, model: ModelConfig, per_block: int, *, can_stretch: bool) -> int:
    """Blocks in a share of the memory; if asked, up to half of it for the sake of one request."""
    share = int(config.cache.cpu_memory_share * _total_memory())
    num_blocks = min(share // per_block, useful_blocks(config, model))
    if not can_stretch:
        return num_blocks
    one = max_blocks_per_request(config, model) + 1
    return max(num_blocks, min(_total_memory() // 2 // per_block, one))


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpu_budget(config: EngineConfig, device: Any, memory_fraction: float) -> int:
    """Bytes of a GPU that utilization leaves beside what is in use.

    memory_fraction: the share of the GPU's memory that JAX's allocator may take. Utilization is of
    the whole memory, as vLLM's.
    """
    stats = device.memory_stats() or {}
    limit, in_use = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
    requested = int(config.cache.gpu_memory_utilization * limit / memory_fraction)
    if requested > limit:
        logger.info(
            "gpu_memory_utilization=%s is more than JAX may take, which is %.2f of the memory; "
            "XLA_CLIENT_MEM_FRACTION raises that",
            config.cache.gpu_memory_utilization,
            memory_fraction,
        )
    return min(requested, limit) - in_use


def _fit_gpu(
    config: EngineConfig,
    model: ModelConfig,
    per_block: int,
    budget: int,
    measure: MeasureBytes | None,
) -> int:
    """Blocks that fit a budget beside the rows and the largest program.

    Programs are compiled for one size of the pool. So a careful size is guessed, and what is
    measured for it confirms it: the programs compiled for the measurement are then those that run,
    and the next start finds them. Only a guess that is too large, or wastes too much, is changed.
    """
    one, most = max_blocks_per_request(config, model) + 1, useful_blocks(config, model)

    def beside(activations: int) -> int:
        left = budget - rows_bytes(config) - activations
        num_blocks = blocks_in(left, per_block, model.num_layers)
        unit = 1 << max(num_blocks.bit_length() - _KEPT_BITS, 0)
        num_blocks = min(max(num_blocks - num_blocks % unit, min(num_blocks, one)), most)
        return _addressable(num_blocks, config, model)

    estimate = beside(estimated_activations(config, model))
    guess = max(estimate, one)
    activations = measure(config, guess) if measure else None
    if activations is None:
        return estimate
    fitting = beside(activations)
    logger.info(
        "The largest program takes %.3f GiB, which leaves %.3f GiB to the KV cache",
        activations / _GIB,
        fitting * per_block / _GIB,
    )
    return guess if guess <= fitting <= guess * (1 + _KEPT_SHARE) else fitting


def _addressable(num_blocks: int, config: EngineConfig, model: ModelConfig) -> int:
    """No more blocks than kernels can address. Raises ConfigError if an override asks for more."""
    per_block = config.cache.block_size * model.num_kv_heads * model.head_dim
    has_kernels = config.implementation == "pallas" and config.has_8_bit_kv
    if not has_kernels or is_addressable(num_blocks * per_block):
        return num_blocks
    most, enough = MAX_BYTES_OF_8_BITS // per_block, 2**32 // per_block + 1
    if config.cache.num_gpu_blocks_override is not None:
        raise ConfigError(
            f"num_gpu_blocks_override={num_blocks} makes pools of {num_blocks * per_block} bytes a "
            "layer in 8 bits, and kernels can not address those between 2**31 and 2**32; take "
            f"{most} or fewer, or {enough} or more"
        )
    logger.info("%d blocks instead of %d, which kernels can not address", most, num_blocks)
    return most


def _too_small(config: EngineConfig, model: ModelConfig, num_blocks: int, per_block: int) -> str:
    longest = longest_model_len(num_blocks, config, model)
    needed = (max_blocks_per_request(config, model) + 1) * per_block / _GIB
    return (
        f"one request of max_model_len={config.max_model_len} tokens needs {needed:.3f} GiB of KV "
        f"cache, and the pool has {max(num_blocks, 0) * per_block / _GIB:.3f} GiB ({num_blocks} "
        f"blocks); lower max_model_len to at most {longest}, or give the pool more: "
        "kv_cache_memory_bytes, num_gpu_blocks_override or gpu_memory_utilization"
    )
