"""The compiled entry points: the only place that calls `jax.jit`.

Every program that changes the state donates it: the caller rebinds, and the old value is gone.
Programs are shared by all engines of a process, so that an equal engine compiles nothing.
"""

import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import monitoring

from jpaged.core import beam, block_pool, logits_rules, rows, step, usage
from jpaged.core.state import EngineState, init_state
from jpaged.kv_format import kv_format
from jpaged.model_config import ModelConfig
from jpaged.models import prepare
from jpaged.models.prepare import ServingFormat
from jpaged.ops.kv_cache import init_layer_kv
from jpaged.ops.linear import linear
from jpaged.ops.paged_attention import paged_attention
from jpaged.typing import Array, Int, Params, UInt32

logger = logging.getLogger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

match_admissions = jax.jit(rows.match_admissions, static_argnames="window")
run_step = jax.jit(
    step.step,
    donate_argnames="state",
    static_argnames=("forward", "num_tokens", "num_decode_rows", "sampler", "num_prompt_top"),
)
run_window = jax.jit(
    step.decode_window, donate_argnames="state", static_argnames=("forward", "num_steps", "sampler")
)
spread = jax.jit(beam.spread, donate_argnames="state")
run_beams = jax.jit(
    beam.beam_window,
    donate_argnames="state",
    static_argnames=("forward", "num_steps", "num_candidates"),
)
set_rules = jax.jit(logits_rules.set_rules, donate_argnames="rules")
set_masks = jax.jit(logits_rules.set_masks, donate_argnames="rules")
read_usage = jax.jit(usage.usage)
reset_hashes = jax.jit(block_pool.reset_hashes, donate_argnames="pool")


def _admit(
    state: EngineState, admissions: rows.Admissions, *, window: int | None
) -> tuple[EngineState, Int[Array, ""]]:
    state, _ = rows.admit(state, admissions, window=window)
    return state, block_pool.num_free(state.pool)


def _release(state: EngineState, row_ids: Int[Array, " A"]) -> tuple[EngineState, Int[Array, ""]]:
    state = rows.release(state, row_ids)
    return state, block_pool.num_free(state.pool)


def _empty_state(
    hash_key: UInt32[Array, " 4"],
    *,
    model: ModelConfig,
    dtype: str,
    num_rows: int,
    num_blocks: int,
    block_size: int,
    max_blocks_per_row: int,
    rule_sizes: logits_rules.RuleSizes,
    processors: tuple[logits_rules.LogitsProcessor, ...],
    is_cpu: bool,
    kv_cache_dtype: str = "auto",
    implementation: str = "xla",
) -> EngineState:
    shape = (num_blocks, block_size, model.num_kv_heads, model.head_dim)
    kv_dtype, scales = kv_format(kv_cache_dtype, dtype)
    return init_state(
        tuple(
            init_layer_kv(*shape, kv_dtype, is_cpu, scales, implementation=implementation)
            for _ in model.layers
        ),
        num_rows=num_rows,
        max_blocks_per_row=max_blocks_per_row,
        hash_key=hash_key,
        num_stop_ids=rule_sizes.num_stop_ids,
        rule_sizes=rule_sizes,
        processors=processors,
    )


def _prepare_layer(layer: Params, form: ServingFormat) -> Params:
    # Copies: jit would hand leaves that stay as they are through, and their owner may donate them.
    return jax.tree.map(jnp.copy, prepare.prepare_layer(layer, form))


def _prepare_ends(ends: Params, form: ServingFormat, *, tied: bool) -> Params:
    return jax.tree.map(jnp.copy, prepare.prepare_ends(ends, form, tied=tied))


empty_state = jax.jit(
    _empty_state,
    static_argnames=(
        "model",
        "dtype",
        "num_rows",
        "num_blocks",
        "block_size",
        "max_blocks_per_row",
        "rule_sizes",
        "processors",
        "is_cpu",
        "kv_cache_dtype",
        "implementation",
    ),
)
admit = jax.jit(_admit, donate_argnames="state", static_argnames="window")
release = jax.jit(_release, donate_argnames="state")
prepare_layer = jax.jit(_prepare_layer, static_argnames="form")
prepare_ends = jax.jit(_prepare_ends, static_argnames=("form", "tied"))

# One op alone, for those who time it.
attend = jax.jit(
    paged_attention,
    static_argnames=("num_decode_rows", "scale", "window", "soft_cap", "implementation"),
)
multiply = jax.jit(linear, static_argnames="dtype")


class CompileClock:
    """Counts the programs compiled or fetched from the persistent cache, and the seconds spent."""

    def __init__(self) -> None:
        self.num_programs, self.seconds = 0, 0.0
        monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            self.num_programs += 1
            self.seconds += duration_secs


compile_clock = CompileClock()


def keep_programs(folder: str | None) -> None:
    """Keeps compiled programs in a folder between runs; None: in the user's cache, "": nowhere.

    A folder that the program itself has given to JAX stays. A user without a home has no cache.
    """
    given = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if folder == "" or (folder is None and given):
        return
    folder = folder or _user_folder()
    if folder is None:
        logger.warning(
            "Programs are kept nowhere: this user has no home; give compilation_cache_dir, or set "
            "XDG_CACHE_HOME"
        )
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    # Small programs count too: there are many, and each costs tenths of a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _user_folder() -> str | None:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return str((Path(base) if base else Path.home() / ".cache") / "jpaged" / "programs")
    except RuntimeError:  # neither HOME nor an entry among the users, as in some containers
        return None


def native_folder(folder: str | None) -> Path | None:
    """Where compiled native kernels are kept: with the programs, after `keep_programs(folder)`."""
    programs = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return None if folder == "" or not programs else Path(programs) / "native"


def memory_fraction() -> float:
    """The share of a GPU's memory that JAX's allocator takes: JAX's default unless told."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    told = [value for name in names if (value := os.environ.get(name))]
    return float(told[0]) if told else 0.75
