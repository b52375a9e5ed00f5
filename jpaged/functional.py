"""jpaged as pure functions, for programs with a `jit` of their own: see docs/functional.md.

Everything here works inside the caller's `jit` and `lax.scan`, with donation or without. The engine
is one immutable value, `EngineState`; functions take it and give the next one.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jpaged.core import functional as core
from jpaged.core import state as core_state
from jpaged.core.admissions import Sampling, make_admissions
from jpaged.core.batch import Forward
from jpaged.core.beam import beam_window
from jpaged.core.beam_rules import Beams, Hypotheses, init_beams
from jpaged.core.functional import (
    STATUS_NOT_SEATED,
    Generation,
    blocks_per_prompt,
    new_weights,
    step_inputs,
)
from jpaged.core.logits_rules import (
    LogitsProcessor,
    LogitsRules,
    RuleSizes,
    make_rules,
    set_rules,
)
from jpaged.core.rows import Admissions, admit, fork, release
from jpaged.core.sampling import (
    RUNNING,
    STOP_EOS,
    STOP_LENGTH,
    STOP_TOKEN,
    Sampler,
    seed_key,
)
from jpaged.core.state import EngineState, check_invariants
from jpaged.core.step import (
    STATUS_BAD_NUMBERS,
    STATUS_NO_BLOCKS,
    STATUS_NO_CHOICE,
    STATUS_OK,
    STOP_ERROR,
    StepInputs,
    StepOutput,
    decode_window,
    step,
)
from jpaged.errors import ConfigError
from jpaged.kv_format import kv_format
from jpaged.model_config import ModelConfig
from jpaged.models.forward import dense_forward, init_params, make_forward
from jpaged.models.prepare import prepare
from jpaged.models.registry import abstract_params
from jpaged.native import library
from jpaged.ops.kv_cache import init_layer_kv
from jpaged.typing import Array, Int, Params, UInt32

__all__ = [
    "RUNNING",
    "STATUS_BAD_NUMBERS",
    "STATUS_NOT_SEATED",
    "STATUS_NO_BLOCKS",
    "STATUS_NO_CHOICE",
    "STATUS_OK",
    "STOP_EOS",
    "STOP_ERROR",
    "STOP_LENGTH",
    "STOP_TOKEN",
    "Admissions",
    "Beams",
    "EngineState",
    "Forward",
    "Generation",
    "Hypotheses",
    "LogitsProcessor",
    "LogitsRules",
    "ModelConfig",
    "RuleSizes",
    "Sampler",
    "Sampling",
    "StepInputs",
    "StepOutput",
    "abstract_params",
    "admit",
    "beam_window",
    "blocks_per_prompt",
    "check_invariants",
    "decode_window",
    "dense_forward",
    "fork",
    "generate",
    "init_beams",
    "init_params",
    "init_state",
    "load_native",
    "make_admissions",
    "make_forward",
    "make_rules",
    "new_weights",
    "prepare",
    "release",
    "request_root",
    "seed_key",
    "set_rules",
    "step",
    "step_inputs",
]


def init_state(
    config: ModelConfig,
    *,
    num_rows: int,
    max_model_len: int,
    key: jax.Array,
    dtype: DTypeLike | None = None,
    kv_cache_dtype: str = "auto",
    implementation: str = "xla",
    block_size: int = 16,
    num_blocks: int | None = None,
    num_stop_ids: int = 16,
    rule_sizes: RuleSizes | None = None,
    processors: tuple[LogitsProcessor, ...] = (),
) -> EngineState:
    """An empty engine for a model.

    num_rows: sequences it holds at once. max_model_len: tokens of each, prompt and output together.
    key: of `jax.random`; makes the prefix cache's hashes unpredictable.
    dtype: the model's; the config's if None. kv_cache_dtype: of the KV cache, as in `EngineConfig`;
        auto is the model's.
    implementation: see `generate`; here it is what writes the KV cache and copies its blocks.
    num_blocks: the null block included; None: enough for all rows at full length.
    rule_sizes: the room for rules that change logits (`make_rules`); None: for none.
    processors: logits processors that rules may name.

    Raises ConfigError if a size is not positive, the model has fewer positions, or KV can not have
    the dtype.
    """
    sizes = {"num_rows": num_rows, "max_model_len": max_model_len, "block_size": block_size}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name}={size} must be at least 1")
    if max_model_len > config.max_position:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds the model's {config.max_position} positions"
        )
    M = -(-max_model_len // block_size)
    N = num_rows * M + 1 if num_blocks is None else num_blocks
    if N < 2:
        raise ConfigError(f"num_blocks={N} must be at least 2: the first is the null block")
    name = jnp.dtype(config.dtype if dtype is None else dtype).name
    kv_dtype, scales = kv_format(kv_cache_dtype, name)
    is_cpu = jax.default_backend() == "cpu"
    shape = (N, block_size, config.num_kv_heads, config.head_dim)
    return core_state.init_state(
        tuple(
            init_layer_kv(*shape, kv_dtype, is_cpu, scales, implementation=implementation)
            for _ in config.layers
        ),
        num_rows=num_rows,
        max_blocks_per_row=M,
        hash_key=jax.random.bits(key, (4,), jnp.uint32),
        num_stop_ids=num_stop_ids,
        rule_sizes=rule_sizes,
        processors=processors,
    )


def generate(
    params: Params,
    prompts: ArrayLike,
    prompt_lens: ArrayLike,
    keys: ArrayLike,
    *,
    config: ModelConfig,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 - immutable
    n: int = 1,
    rules: LogitsRules | None = None,
    processors: tuple[LogitsProcessor, ...] = (),
    state: EngineState | None = None,
    is_prepared: bool = False,
    dtype: DTypeLike | None = None,
    kv_cache_dtype: str = "auto",
    deterministic: bool = False,
    implementation: str = "xla",
    quantization: str | None = None,
    num_blocks: int | None = None,
    block_size: int = 16,
    num_prefill_tokens: int = 1024,
    num_decode_steps: int = 8,
    pad_id: int = 0,
) -> Generation:
    """Completes A prompts with n samples each: `jpaged.core.functional.generate` for a model.

    params: the canonical tree, prepared for serving in the same program; or, with `is_prepared`,
        what `prepare` made of it for the same `implementation`.
    prompts: i32[A P] ids in the vocabulary, padded on the right. prompt_lens: i32[A], 1 to P.
    keys: A keys of `jax.random`, or u32[A 2] of `seed_key`s: the same as `SamplingParams(seed=)`.
    rules: penalties, masks, bias and the like, see `make_rules`; None changes no logits.
    processors: the logits processors that `rules` were made with.
    state: None makes one for this call alone, of `num_blocks` blocks of `block_size`. If given, it
        is used as it is, prefix cache included: call `new_weights` on it when `params` change.
    dtype: of weights and activations; None takes the dtype that `params` have. kv_cache_dtype: of
        the KV cache that is made for this call, as in `EngineConfig`; auto is `dtype`.
    deterministic: a row has the same bits among any others, at some cost.
    implementation: of attention and products. "native" is faster on a CPU, but must be loaded
        (`load_native`), has no derivative, and under `vmap` runs one member after the other.
        "pallas" is for NVIDIA GPUs, has no derivative either, and is interpreted on a CPU.
    quantization: int8 or int4, see `prepare`, of canonical `params`.

    Raises ValueError when traced: a tree of another model, or shapes that do not fit each other or
    the state.
    """
    prompts, prompt_lens = (jnp.asarray(x, jnp.int32) for x in (prompts, prompt_lens))
    keys = jnp.asarray(keys)
    # A serving tree may have its table as bits.
    own = params["model"]["norm" if is_prepared else "embed_tokens"]["weight"]
    run_dtype: DTypeLike = own.dtype if dtype is None else dtype
    if not is_prepared:
        _check_canonical(params, config)
        params = prepare(
            params,
            config,
            run_dtype,
            implementation=implementation,
            quantization=quantization,
        )
    if state is None:
        state = init_state(
            config,
            num_rows=max(prompts.shape[0] * n, 1),
            max_model_len=prompts.shape[1] + max_new_tokens,
            # Prompts of one call are seated together: none can find another's blocks.
            key=jax.random.key(0),
            dtype=run_dtype,
            kv_cache_dtype=kv_cache_dtype,
            implementation=implementation,
            block_size=block_size,
            num_blocks=num_blocks,
            rule_sizes=None if rules is None else rules.sizes,
            processors=processors,
        )
    return core.generate(
        params,
        state,
        prompts,
        prompt_lens,
        keys,
        forward=make_forward(config, deterministic=deterministic, implementation=implementation),
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        n=n,
        rules=rules,
        processors=processors,
        request_root=request_root(config, prompt_lens),
        num_prefill_tokens=num_prefill_tokens,
        num_decode_steps=num_decode_steps,
        pad_id=pad_id,
    )


def load_native(folder: str | Path | None = None) -> None:
    """Makes `implementation="native"` ready, outside of any `jit`: compiles and loads the C++.

    folder: where what was compiled is kept; None keeps nothing.

    Raises NativeUnavailableError with the reason, such as a missing compiler.
    """
    library.load(None if folder is None else Path(folder))


def _check_canonical(params: Params, config: ModelConfig) -> None:
    """Tells a foreign tree by its names; shapes are told apart by the products."""
    names, expected = (
        {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)}
        for tree in (params, abstract_params(config, "float32"))
    )
    if names != expected:
        raise ConfigError(
            f"params are not the canonical tree of this model: missing "
            f"{sorted(expected - names)[:3]}, unknown {sorted(names - expected)[:3]}; "
            "for what `prepare` returned, say is_prepared=True"
        )


def request_root(config: ModelConfig, prompt_lens: Int[Array, " A"]) -> UInt32[Array, "A 4"]:
    """For `make_admissions`: the prompt's length, where rope and hence KV depend on it."""
    root = jnp.zeros((prompt_lens.shape[0], 4), jnp.uint32)
    start = config.dynamic_rope_start
    if start is None:
        return root
    return root.at[:, 0].set(jnp.where(prompt_lens > start, prompt_lens, 0).astype(jnp.uint32))
