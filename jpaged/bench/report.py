"""What every benchmark that serves requests reports alike: speeds, programs, and the setting."""

import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import jpaged
from jpaged import LLM, SamplingParams
from jpaged.bench.machine import LoadClock, num_cpus, peak_rss_mib, seconds_since_process_start
from jpaged.engine.compiled import compile_clock


def first_token(llm: LLM, prompt_ids: Sequence[int]) -> dict[str, Any]:
    """Serves a tiny request; the seconds from the process's start until its token was there."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    llm.generate([list(prompt_ids[:4])], params, use_tqdm=False)
    seconds = seconds_since_process_start()
    return {"cold_start_s": None if seconds is None else round(seconds, 2)}


def programs() -> dict[str, Any]:
    """What has been compiled so far, or read from the persistent cache, and the seconds it took."""
    return {
        "compile_s": round(compile_clock.seconds, 3),
        "num_programs": compile_clock.num_programs,
    }


def speeds(clocks: Sequence[LoadClock], num_prompt: int, num_output: int) -> dict[str, Any]:
    """By the median of equal runs, each of so many tokens of prompts and of output."""
    wall = statistics.median(clock.seconds for clock in clocks)
    return {
        "output_tokens_per_s": round(num_output / wall, 2),
        "total_tokens_per_s": round((num_prompt + num_output) / wall, 2),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "wall_s": round(wall, 3),
        "wall_s_of_reps": [round(clock.seconds, 3) for clock in clocks],
        **load(clocks),
        "peak_rss_mib": round(peak_rss_mib(), 1),
    }


def load(clocks: Sequence[LoadClock]) -> dict[str, Any]:
    """How busy this process and all others kept the machine."""
    return {
        "own_cpu_share": [round(clock.own_share, 3) for clock in clocks],
        "other_cpu_share": [
            None if clock.other_share is None else round(clock.other_share, 3) for clock in clocks
        ],
    }


def setting(llm: LLM, model: str) -> dict[str, Any]:
    """What was measured, how it was configured, and where it ran."""
    config = llm.engine.config
    return {
        "engine": "jpaged",
        "model": Path(model).name,
        "dtype": llm.dtype,
        "quantization": config.quantization,
        "implementation": config.implementation,
        "attention_implementation": config.attention_implementation,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "block_size": config.cache.block_size,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "num_decode_steps": config.num_decode_steps,
        "deterministic": config.deterministic,
        **machine(),
    }


def machine() -> dict[str, Any]:
    """Where it ran, and with what."""
    return {
        "device": jax.devices()[0].device_kind,
        "num_cpus": num_cpus(),
        "versions": {
            "jpaged": jpaged.__version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
    }
