"""How an engine runs: every value judged when it is made, every default resolved before it starts.

What a model is stands in `jpaged.model_config`. Names and defaults are vLLM's where it has them.
"""

import dataclasses
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal, get_args

from jpaged.errors import ConfigError
from jpaged.kv_format import NAMES, kv_format
from jpaged.model_config import LayerConfig, ModelConfig

__all__ = ["CacheConfig", "EngineConfig", "LayerConfig", "ModelConfig"]

Implementation = Literal["auto", "xla", "native", "pallas"]
Quantization = Literal["int8", "int4", "gguf"]
LoadFormat = Literal["auto", "dummy"]
WarmUp = Literal["off", "before", "background"]
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")

# Rows and tokens of a step by default. A CPU is busy with 64 rows; a GPU is not.
_DEFAULT_NUM_SEQS = {"cpu": 64, "gpu": 256}
_DEFAULT_BATCHED_TOKENS = {"cpu": 1024, "gpu": 8192}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The block pool.

    block_size: tokens per block, 1 to 256.
    kv_cache_dtype: of keys and values; auto is the model's. Of 8 bits are fp8 (or fp8_e4m3) and
        fp8_e5m2, stored as they are, and fp8_per_token_head and int8_per_token_head (or int8), with
        a scale for each token and KV head.
    enable_prefix_caching: keep full blocks for later requests with the same prefix.
    num_gpu_blocks_override: blocks in the pool, the null block included, whatever memory there is.
    kv_cache_memory_bytes: bytes for KV, instead of a share of the memory.
    gpu_memory_utilization: share of a GPU's memory that the engine may use. On a CPU the pool takes
        `cpu_memory_share` of the machine's memory, at most what all rows together can use.
    watermark: share of the blocks that admissions leave free while other requests run, below 1; a
        little saves preemptions of requests that grow.
    """

    block_size: int = 16
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    cpu_memory_share: float = 0.05
    watermark: float = 0.0

    def __post_init__(self) -> None:
        _check_range("block_size", self.block_size, 1, 256)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, NAMES)
        _check_share("gpu_memory_utilization", self.gpu_memory_utilization)
        _check_share("cpu_memory_share", self.cpu_memory_share)
        is_real = isinstance(self.watermark, Real) and not isinstance(self.watermark, bool)
        if not (is_real and 0 <= self.watermark < 1):
            raise ConfigError(f"watermark must be from 0 to below 1, got {self.watermark!r}")
        if self.num_gpu_blocks_override is not None:
            _check_range("num_gpu_blocks_override", self.num_gpu_blocks_override, 2)
        if self.kv_cache_memory_bytes is not None:
            _check_range("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine. None means: by model and device, see `resolved`.

    dtype: of weights, KV and activations; auto is the checkpoint's.
    load_format: of the weights; auto is the checkpoint's own. dummy draws them at random, for
        benchmarks: the model may be a directory with nothing but a config.json.
    quantization: int8 or int4 makes numbers of so many bits of all matrices, in groups of 32 inputs
        with a scale (and, for int4, a least), when they are loaded; biases, norms and the embedding
        table stay in `dtype`, and the LM head is int8 with int4 too. gguf serves the numbers that a
        GGUF file has, without a change, where they are Q8_0, Q4_0 or Q4_1, and its other matrices
        as int8.
    max_model_len: most tokens of a request, prompt and output together. None takes what the model
        can; "auto" (or -1) as much of that as one request can have of the block pool.
    max_num_seqs: rows, so the most sequences resident at once.
    max_num_batched_tokens: token budget of a step; a longer prompt is read in chunks.
    long_prefill_token_threshold: most tokens of one prompt in a step; 0 is no limit.
    num_decode_steps: J, the decode steps made between two looks at the queue. 1 has the lowest
        latency; it never changes results.
    seed: seeds requests that bring no seed of their own, by their ordinal.
    deterministic: the same bits for a request in any batch, at some cost.
    implementation: of attention and products. native: in C++, compiled at first use, on a CPU
        alone. pallas: kernels for NVIDIA GPUs; a CPU interprets them, slowly. auto is native on a
        CPU and pallas on a GPU where that can be had, else xla.
    max_logprobs: most log-probabilities per token that a request may ask for; -1: no limit.
    logprobs_mode: what is told of an id: its log-probability or logit, raw from the model, or after
        all that a request does to it.
    logits_processors: `LogitsProcessor`s that requests may name, compiled into the steps.
    head_dtype: of the last product, which gives the logits; auto is `dtype`, or int8 if matrices
        are quantized; float32 keeps the head's weights as precise as the checkpoint has them.
    max_stop_ids, max_logit_bias, max_bad_words, max_bad_word_len: most stop ids, biased ids, bad
        words (each spelling counts) and tokens of one, that a request may ask for.
    compilation_cache_dir: where compiled programs are kept between runs; "" keeps none.
    warm_up: when the programs are compiled, or fetched from there, that requests need which ask
        for nothing but tokens. off: each when it is first needed, and requests wait for it. before:
        all of them before the first request. background: all of them, one by one in a thread, while
        the first requests run. None: off, and background in an `AsyncEngine`.
    """

    dtype: str = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization | None = None
    max_model_len: int | Literal["auto"] | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    num_decode_steps: int = 8
    max_stop_ids: int = 16
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    logits_processors: Sequence[Any] = ()
    head_dtype: Literal["auto", "float32"] = "auto"
    max_logit_bias: int = 300
    max_bad_words: int = 64
    max_bad_word_len: int = 8
    seed: int = 0
    deterministic: bool = False
    implementation: Implementation = "auto"
    compilation_cache_dir: str | None = None
    warm_up: WarmUp | None = None
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)

    def __post_init__(self) -> None:
        if self.max_model_len == -1:
            object.__setattr__(self, "max_model_len", "auto")
        if self.max_model_len not in (None, "auto"):
            _check_range("max_model_len", self.max_model_len, 1)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), 1)
        _check_range("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        _check_range("num_decode_steps", self.num_decode_steps, 1, 256)
        _check_range("max_stop_ids", self.max_stop_ids, 1, 1024)
        _check_range("max_logprobs", self.max_logprobs, -1)
        for name in ("max_logit_bias", "max_bad_words", "max_bad_word_len"):
            _check_range(name, getattr(self, name), 1, 4096)
        _check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        _check_choice("head_dtype", self.head_dtype, ("auto", "float32"))
        _check_choice("load_format", self.load_format, get_args(LoadFormat))
        if self.quantization is not None:
            _check_choice("quantization", self.quantization, get_args(Quantization))
        if self.warm_up is not None:
            _check_choice("warm_up", self.warm_up, get_args(WarmUp))
        object.__setattr__(self, "logits_processors", _processors(self.logits_processors))
        _check_range("seed", self.seed, -(2**63), 2**64 - 1)
        _check_choice("implementation", self.implementation, get_args(Implementation))

    @property
    def has_8_bit_kv(self) -> bool:
        """Whether keys and values have 8 bits."""
        return kv_format(self.cache.kv_cache_dtype, "float32").is_quantized

    @property
    def attention_implementation(self) -> str:
        """Of attention: "native" leaves that over KV of 8 bits to XLA."""
        is_native = self.implementation == "native"
        return "xla" if is_native and self.has_8_bit_kv else self.implementation

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """From flat options, as on a command line; those of the cache go into `cache`.

        Raises ConfigError for an option that does not exist.
        """
        cache_names = {field.name for field in dataclasses.fields(CacheConfig)}
        own_names = {field.name for field in dataclasses.fields(cls)} - {"cache"}
        if unknown := sorted(set(options) - cache_names - own_names):
            known = ", ".join(sorted(cache_names | own_names))
            raise ConfigError(f"unknown option {unknown[0]!r}; there are {known}")
        cache = {name: options.pop(name) for name in cache_names & set(options)}
        return cls(**options, cache=CacheConfig(**cache))

    def resolved(self, model: ModelConfig, platform: str) -> "EngineConfig":
        """The same with no value left open, checked against the model.

        Two may stay "auto": max_model_len, as the size of the pool decides
        (`engine.capacity.fit_pool`), and implementation, as the machine's compiler or GPU does
        (`engine.implementation.resolve`).

        Raises ConfigError if max_model_len exceeds what the model can tell positions apart for, the
        token budget is smaller than the number of rows, or the implementation is for a CPU alone or
        has no attention over such a KV cache.
        """
        max_model_len = self.max_model_len or model.max_position
        if max_model_len != "auto" and max_model_len > model.max_position:
            raise ConfigError(
                f"max_model_len={max_model_len} exceeds the {model.max_position} positions of the "
                f"model; lower it, or use a checkpoint with a rope scaling for longer contexts"
            )
        device = "cpu" if platform == "cpu" else "gpu"
        num_seqs = self.max_num_seqs or _DEFAULT_NUM_SEQS[device]
        if self.implementation == "native" and device != "cpu":
            raise ConfigError('implementation="native" is for a CPU alone; choose auto or xla')
        if self.implementation == "native" and self.has_8_bit_kv:
            raise ConfigError(
                'implementation="native" has no attention over KV of 8 bits '
                f"(kv_cache_dtype={self.cache.kv_cache_dtype!r}); choose auto, which has native "
                "products and leaves attention to XLA, or a KV cache of auto, float32 or bfloat16"
            )
        batched = self.max_num_batched_tokens or max(_DEFAULT_BATCHED_TOKENS[device], num_seqs)
        if batched < num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={batched} is below max_num_seqs={num_seqs}: a step could "
                "not give each row a token; raise the one or lower the other"
            )
        return dataclasses.replace(
            self,
            max_model_len=max_model_len,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=batched,
        )


def _check_range(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be {limit}, got {value}")


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is unknown; choose {' or '.join(choices)}")


def _processors(given: Any) -> tuple[Any, ...]:
    processors = tuple(given or ())
    names = [getattr(processor, "name", None) for processor in processors]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"logits_processors must be jpaged.LogitsProcessor records, got {given!r}; vLLM's "
            "classes do not run inside a compiled step"
        )
    if len(set(names)) < len(names):
        raise ConfigError(f"logits_processors must have different names, got {names}")
    return processors


def _check_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{name} must be above 0 and at most 1, got {value!r}")
