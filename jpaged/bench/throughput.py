"""Throughput of a workload: all its requests at once, as fast as the engine can.

A workload is a .jsonl file; each line has `prompt_ids` and `max_tokens`, and optionally `id`, `n`,
`temperature` and `ignore_eos`. The end of sequence is ignored, so that any engine does equal work.
"""

import dataclasses
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import jpaged
from jpaged import LLM, SamplingParams
from jpaged.bench.machine import LoadClock, num_cpus, peak_rss_mib
from jpaged.engine.compiled import compile_clock
from jpaged.engine.prompt_file import check_token_ids, numbered_lines, parse_json
from jpaged.errors import RequestError

_KEYS = {"id", "prompt_ids", "max_tokens", "n", "temperature", "ignore_eos"}


@dataclasses.dataclass(frozen=True)
class WorkItem:
    """One request of a workload."""

    prompt_ids: list[int]
    params: SamplingParams


def read_workload(path: Path, limit: int | None = None) -> list[WorkItem]:
    """The requests of a file, or the first `limit`. Raises RequestError with file and line."""
    items: list[WorkItem] = []
    for where, text in numbered_lines(path):
        entry = parse_json(text, where)
        try:
            items.append(_work_item(entry))
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None
        if len(items) == limit:
            break
    if not items:
        raise RequestError(f"{path} has no requests")
    return items


def _work_item(entry: Any) -> WorkItem:
    if not isinstance(entry, dict) or not {"prompt_ids", "max_tokens"} <= entry.keys() <= _KEYS:
        raise RequestError(
            "a line of a workload is an object with prompt_ids and max_tokens, and optionally "
            f"id, n, temperature and ignore_eos; got {entry!r:.80}"
        )
    check_token_ids(entry["prompt_ids"])
    params = SamplingParams(
        max_tokens=entry["max_tokens"],
        n=entry.get("n", 1),
        temperature=entry.get("temperature", 0.0),
        ignore_eos=True,
        detokenize=False,
    )
    return WorkItem(entry["prompt_ids"], params)


def measure(
    model: str, workload: Sequence[WorkItem], *, reps: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Runs a workload once to compile what it needs, then `reps` times by the clock.

    options: `LLM`'s. Each run starts with an empty prefix cache. Returns figures that JSON can
    hold: speeds by the median run; counts of tokens, windows and preemptions for one run.
    """
    prompts = [item.prompt_ids for item in workload]
    params = [item.params for item in workload]
    with LLM(model, skip_tokenizer_init=True, **options) as llm:
        warm_up, _ = _run(llm, prompts, params)
        compiled = {
            "warm_up_s": round(warm_up.seconds, 3),
            "compile_s": round(compile_clock.seconds, 3),
            "num_programs": compile_clock.num_programs,
        }
        before = dataclasses.replace(llm.stats)
        clocks, num_output = [], []
        for _ in range(reps):
            clock, num_tokens = _run(llm, prompts, params)
            clocks.append(clock)
            num_output.append(num_tokens)
        return {
            **_speeds(clocks, sum(map(len, prompts)), statistics.median_low(num_output)),
            "outputs_ok": set(num_output) == {sum(one.n * (one.max_tokens or 0) for one in params)},
            "num_requests": len(workload),
            "num_sequences": sum(one.n for one in params),
            **_counts(llm, before, reps),
            **compiled,
            "num_programs_while_measured": compile_clock.num_programs - compiled["num_programs"],
            **setting(llm, model),
        }


def _run(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> tuple[LoadClock, int]:
    """One run with an empty prefix cache: its time, and the tokens of output."""
    llm.reset_prefix_cache()
    with LoadClock() as clock:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return clock, sum(len(one.token_ids) for output in outputs for one in output.outputs)


def _speeds(clocks: Sequence[LoadClock], num_prompt: int, num_output: int) -> dict[str, Any]:
    wall = statistics.median(clock.seconds for clock in clocks)
    return {
        "output_tokens_per_s": round(num_output / wall, 2),
        "total_tokens_per_s": round((num_prompt + num_output) / wall, 2),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "wall_s": round(wall, 3),
        "wall_s_of_reps": [round(clock.seconds, 3) for clock in clocks],
        "own_cpu_share": [round(clock.own_share, 3) for clock in clocks],
        "other_cpu_share": [
            None if clock.other_share is None else round(clock.other_share, 3) for clock in clocks
        ],
        "peak_rss_mib": round(peak_rss_mib(), 1),
    }


def _counts(llm: LLM, before: Any, reps: int) -> dict[str, Any]:
    """What one run took, on average: the engine's counts since `before`."""

    def since(name: str) -> float:
        return (getattr(llm.stats, name) - getattr(before, name)) / reps

    num_decoded = since("num_decode_tokens")
    return {
        "window_share": round(since("num_window_tokens") / num_decoded, 4) if num_decoded else None,
        "num_preemptions": since("num_preemptions"),
        "num_cached_prompt_tokens": since("num_cache_hits"),
        "num_kv_blocks": llm.engine.num_blocks,
    }


def setting(llm: LLM, model: str) -> dict[str, Any]:
    """What was measured, how it was configured, and where it ran."""
    config, device = llm.engine.config, jax.devices()[0]
    return {
        "engine": "jpaged",
        "model": Path(model).name,
        "dtype": llm.dtype,
        "block_size": config.cache.block_size,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "num_decode_steps": config.num_decode_steps,
        "deterministic": config.deterministic,
        "device": device.device_kind,
        "num_cpus": num_cpus(),
        "versions": {
            "jpaged": jpaged.__version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
    }
