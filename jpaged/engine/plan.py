"""What a model needs on given devices, on paper: weights, activations, KV cache, requests at once.

Pure arithmetic over a `ModelConfig` and an `EngineConfig`: no device is touched, no weight read.
For one device it is `engine.capacity`'s, with activations by formula where the engine asks the
compiler. Several devices follow vLLM: heads, MLP and vocabulary are split among
`tensor_parallel_size` devices, layers among `pipeline_parallel_size` stages.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jpaged.config import EngineConfig
from jpaged.engine import capacity
from jpaged.errors import ConfigError
from jpaged.kv_format import full_name, kv_format
from jpaged.model_config import ModelConfig
from jpaged.models.prepare import ServingFormat
from jpaged.ops.grouped import Bits, grouped_bytes
from jpaged.ops.kv_cache import layer_kv_bytes

GIB = 2**30
DEVICES = {
    "t4": 14.6,
    "v100-16g": 15.8,
    "l4": 22.0,
    "a10": 22.0,
    "rtx3090": 23.6,
    "rtx4090": 23.6,
    "v100-32g": 31.7,
    "a100-40g": 39.4,
    "l40s": 44.4,
    "a100-80g": 79.1,
    "h100": 79.1,
    "h200": 139.7,
    "b200": 178.3,
}
"""GiB that CUDA reports of each device, a little less than its name says."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_MOST_DEVICES = 64  # of either kind, that advice looks at


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """On what, and in what.

    device: its name, for people. device_bytes: its memory. dtype: of weights and activations.
    """

    device: str
    device_bytes: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    dtype: str


@dataclasses.dataclass(frozen=True)
class Stage:
    """One device of a pipeline stage: what it holds, and the bytes it lacks for one request."""

    num_layers: int
    weight_bytes: int
    block_bytes: int  # of a block of the KV cache, in the stage's layers
    num_blocks: int  # that fit beside everything else
    missing_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan. Bytes are those of one device, the fullest, unless they say otherwise."""

    architecture: str
    hardware: Hardware
    quantization: str | None
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    gpu_memory_utilization: float
    num_parameters: int
    requested_bytes: int  # what utilization allows
    weight_bytes: int
    activation_bytes: int
    rows_bytes: int  # tokens and block tables of all rows
    stages: tuple[Stage, ...]
    kv_bytes_per_token: int  # in all layers, every KV head once, on all devices together
    num_blocks: int
    kv_cache_bytes: int
    kv_cache_tokens: int
    max_blocks_per_request: int
    max_concurrency: float
    longest_model_len: int  # of which the pool holds one request
    missing_bytes: int  # for one request of max_model_len tokens
    fits: bool
    notes: tuple[str, ...]


def make_plan(model: ModelConfig, config: EngineConfig, hardware: Hardware) -> Plan:
    """The plan of a model. config: as a user gives it; None means what the engine takes on a GPU.

    Raises ConfigError if the model can not be split as asked, the config contradicts the model, or
    the quantization depends on a file.
    """
    _check_split(model, hardware)
    if config.quantization == "gguf":
        raise ConfigError(
            'quantization="gguf" takes what numbers the file has, which a plan does not read; plan '
            "with int8 for Q8_0, with int4 for Q4_0 and Q4_1"
        )
    config = config.resolved(model, "gpu")
    is_auto = config.max_model_len == "auto"
    if is_auto:
        config = dataclasses.replace(config, max_model_len=model.max_position)
    num_blocks = _num_blocks(model, config, _stages(model, config, hardware))
    longest = capacity.longest_model_len(num_blocks, config, model)
    if is_auto:
        config = dataclasses.replace(config, max_model_len=max(longest, 1))
    stages = _stages(model, config, hardware)
    missing = max(stage.missing_bytes for stage in stages)
    assert isinstance(config.max_model_len, int)
    return Plan(
        architecture=model.architecture,
        hardware=hardware,
        quantization=config.quantization,
        kv_cache_dtype=full_name(config.cache.kv_cache_dtype, hardware.dtype),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs or 0,
        max_num_batched_tokens=config.max_num_batched_tokens or 0,
        block_size=config.cache.block_size,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        num_parameters=num_parameters(model),
        requested_bytes=_requested_bytes(config, hardware),
        weight_bytes=max(stage.weight_bytes for stage in stages),
        activation_bytes=capacity.estimated_activations(config, _share(model, hardware)),
        rows_bytes=capacity.rows_bytes(config),
        stages=stages,
        kv_bytes_per_token=kv_bytes_per_token(model, config, hardware.dtype),
        num_blocks=num_blocks,
        kv_cache_bytes=num_blocks * max(stage.block_bytes for stage in stages),
        kv_cache_tokens=capacity.kv_cache_tokens(num_blocks, config, model),
        max_blocks_per_request=capacity.max_blocks_per_request(config, model),
        max_concurrency=capacity.max_concurrency(num_blocks, config, model),
        longest_model_len=longest,
        missing_bytes=missing,
        fits=missing == 0,
        notes=tuple(_notes(model, config, hardware, stages, num_blocks)),
    )


def num_parameters(model: ModelConfig) -> int:
    """Parameters of the checkpoint: a tied embedding counts once."""
    tables = model.vocab_size * model.hidden_size * (1 if model.tied else 2)
    return tables + model.num_layers * _layer_bytes(model, 1, None) + model.hidden_size


def kv_bytes_per_token(model: ModelConfig, config: EngineConfig, dtype: str) -> int:
    """Bytes of one token's keys and values in all layers, of a model that runs in `dtype`."""
    one_token = dataclasses.replace(config, cache=dataclasses.replace(config.cache, block_size=1))
    return capacity.block_bytes(one_token, model, dtype)


# --- one device ---


def _check_split(model: ModelConfig, hardware: Hardware) -> None:
    tp, pp = hardware.tensor_parallel_size, hardware.pipeline_parallel_size
    for name in ("num_heads", "intermediate_size"):
        if getattr(model, name) % tp:
            raise ConfigError(
                f"tensor_parallel_size={tp} does not divide {name}={getattr(model, name)}"
            )
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size={tp} neither divides num_kv_heads={model.num_kv_heads} nor is "
            "a multiple of it"
        )
    if pp > model.num_layers:
        raise ConfigError(f"pipeline_parallel_size={pp} exceeds the {model.num_layers} layers")


def _share(model: ModelConfig, hardware: Hardware) -> ModelConfig:
    """The layers as one device has them: KV heads are replicated where there are too few."""
    tp = hardware.tensor_parallel_size
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // tp,
        num_kv_heads=max(model.num_kv_heads // tp, 1),
        intermediate_size=model.intermediate_size // tp,
    )


def _layer_bytes(model: ModelConfig, itemsize: int, bits: Bits | None) -> int:
    D, F, C = model.hidden_size, model.intermediate_size, model.head_dim
    q, qkv = model.num_heads * C, (model.num_heads + 2 * model.num_kv_heads) * C
    biases = model.qkv_bias * qkv + model.o_bias * D + model.mlp_bias * (2 * F + D)
    norms = (4 if model.post_norms else 2) * D + 2 * C * model.qk_norm
    matrices = ((D, qkv), (q, D), (D, 2 * F), (F, D))
    matrix_bytes = sum(_matrix_bytes(*size, itemsize, bits) for size in matrices)
    return matrix_bytes + (biases + norms) * itemsize


def _matrix_bytes(num_in: int, num_out: int, itemsize: int, bits: Bits | None) -> int:
    return num_in * num_out * itemsize if bits is None else grouped_bytes(num_in, num_out, bits)


def _layers_of_stages(num_layers: int, num_stages: int) -> list[int]:
    """As vLLM: what is left over goes to the stages before the last, which has the LM head."""
    layers = [num_layers // num_stages] * num_stages
    for place in range(num_layers % num_stages):
        layers[-2 - place] += 1
    return layers


def _stages(model: ModelConfig, config: EngineConfig, hardware: Hardware) -> tuple[Stage, ...]:
    share, S = _share(model, hardware), config.cache.block_size
    kv = kv_format(config.cache.kv_cache_dtype, hardware.dtype)
    layer_kv = layer_kv_bytes(1, S, share.num_kv_heads, share.head_dim, *kv)
    D, V = model.hidden_size, -(-model.vocab_size // hardware.tensor_parallel_size)
    form, itemsize = ServingFormat.of(config, hardware.dtype), ITEM_BYTES[hardware.dtype]
    # The serving tree has an LM head of its own, tied or not.
    head = _matrix_bytes(D, V, ITEM_BYTES[form.head_dtype or form.dtype], form.head_bits)
    layers = _layers_of_stages(model.num_layers, hardware.pipeline_parallel_size)
    stages = []
    for place, num_layers in enumerate(layers):
        block = num_layers * layer_kv
        weights = num_layers * _layer_bytes(share, itemsize, form.bits)
        weights += V * D * itemsize if place == 0 else 0
        weights += head + D * itemsize if place == len(layers) - 1 else 0
        fixed = (
            weights + capacity.estimated_activations(config, share) + capacity.rows_bytes(config)
        )
        stages.append(_stage(model, config, hardware, num_layers, weights, block, fixed))
    return tuple(stages)


def _stage(
    model: ModelConfig,
    config: EngineConfig,
    hardware: Hardware,
    num_layers: int,
    weight_bytes: int,
    block_bytes: int,
    fixed_bytes: int,
) -> Stage:
    """`fixed_bytes` are all but the KV cache's."""
    one = capacity.max_blocks_per_request(config, model) + 1
    given = _given_blocks(config, block_bytes)
    if given is not None:
        beyond = fixed_bytes + max(given, one) * block_bytes - hardware.device_bytes
        missing = max(beyond, (one - given) * block_bytes, 0)
        return Stage(num_layers, weight_bytes, block_bytes, given, missing)
    left = _requested_bytes(config, hardware) - fixed_bytes
    num_blocks = capacity.blocks_in(left, block_bytes, num_layers)
    needed = -(-one * block_bytes * (2 * num_layers + 1) // (2 * num_layers))
    return Stage(num_layers, weight_bytes, block_bytes, num_blocks, max(needed - left, 0))


def _requested_bytes(config: EngineConfig, hardware: Hardware) -> int:
    return int(config.cache.gpu_memory_utilization * hardware.device_bytes)


def _given_blocks(config: EngineConfig, block_bytes: int) -> int | None:
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    return cache.kv_cache_memory_bytes and cache.kv_cache_memory_bytes // block_bytes


def _num_blocks(model: ModelConfig, config: EngineConfig, stages: tuple[Stage, ...]) -> int:
    fewest = min(stage.num_blocks for stage in stages)
    is_given = _given_blocks(config, 1) is not None
    return fewest if is_given else min(fewest, capacity.useful_blocks(config, model))


# --- what to know, and what to turn ---


def _notes(
    model: ModelConfig,
    config: EngineConfig,
    hardware: Hardware,
    stages: tuple[Stage, ...],
    num_blocks: int,
) -> Iterator[str]:
    tp = hardware.tensor_parallel_size
    windows = [layer.window for layer in model.layers if layer.window is not None]
    if tp > 1 or len(stages) > 1:
        yield "jpaged runs on one device as yet; several are on paper"
    if tp > model.num_kv_heads:
        copies = tp // model.num_kv_heads
        yield f"each of the {model.num_kv_heads} KV heads lies on {copies} devices"
    if model.tied:
        yield "the tied embedding is kept twice, as a table and as the LM head"
    if len(windows) == model.num_layers:
        yield f"blocks behind the window of {max(windows)} tokens are given back"
    elif windows:
        yield (
            f"{len(windows)} of {model.num_layers} layers have a window; they keep all blocks as "
            "the others do"
        )
    fewest = min(stage.num_blocks for stage in stages)
    if fewest > num_blocks == capacity.useful_blocks(config, model):
        yield (
            f"{fewest} blocks would fit; max_num_seqs={config.max_num_seqs} requests of "
            f"{config.max_model_len} tokens use no more than {num_blocks}"
        )


def advice(model: ModelConfig, config: EngineConfig, hardware: Hardware) -> list[str]:
    """Changes each of which alone makes room for a request; empty if there is room, or no way."""

    def fits(config: EngineConfig, hardware: Hardware) -> bool:
        try:
            return make_plan(model, config, hardware).fits
        except ConfigError:  # it can not be split so
            return False

    if fits(config, hardware):
        return []
    found: dict[str, str] = {}
    for option, value, changes, cache, turned in _turns(model, config, hardware):
        if option not in found:
            cache_config = dataclasses.replace(config.cache, **cache)
            turned_config = dataclasses.replace(config, cache=cache_config, **changes)
            if fits(turned_config, dataclasses.replace(hardware, **turned)):
                found[option] = f"{option} {value}".strip()
    return list(found.values())


Turn = tuple[str, Any, dict[str, Any], dict[str, Any], dict[str, Any]]
"""An option, its value, and the changes of the engine's config, its cache's, and the hardware."""


def _turns(model: ModelConfig, config: EngineConfig, hardware: Hardware) -> Iterator[Turn]:
    """What can be turned, the mildest values of each option first."""
    plan = make_plan(model, config, hardware)
    if plan.longest_model_len:
        longest = plan.longest_model_len
        yield "--max-model-len", longest, {"max_model_len": longest}, {}, {}
    for option in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
        if getattr(config.cache, option) is not None:
            yield f"no --{option.replace('_', '-')}", "", {}, {option: None}, {}
    for share in (0.95, 0.98):
        if share > config.cache.gpu_memory_utilization:
            yield "--gpu-memory-utilization", share, {}, {"gpu_memory_utilization": share}, {}
    tokens = plan.max_num_batched_tokens
    while (tokens := tokens // 2) >= plan.max_num_seqs:
        yield "--max-num-batched-tokens", tokens, {"max_num_batched_tokens": tokens}, {}, {}
    if ITEM_BYTES[hardware.dtype] > 2:
        yield "--dtype", "bfloat16", {}, {}, {"dtype": "bfloat16"}
    if not config.has_8_bit_kv:
        yield "--kv-cache-dtype", "fp8", {}, {"kv_cache_dtype": "fp8"}, {}
    for option in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = getattr(hardware, option)
        while (size := 2 * size) <= _MOST_DEVICES:
            yield f"--{option.replace('_', '-')}", size, {}, {}, {option: size}
    for name, gib in DEVICES.items():
        device = {"device": name, "device_bytes": int(gib * GIB)}
        yield "--device", name, {}, {}, device
