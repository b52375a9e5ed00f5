"""Throughput of a workload: all its requests at once, as fast as the engine can."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged import LLM, SamplingParams
from jpaged.bench import report
from jpaged.bench.machine import LoadClock
from jpaged.bench.workload import WorkItem
from jpaged.engine.compiled import compile_clock


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
        cold_start = report.first_token(llm, prompts[0])
        warm_up, _ = _run(llm, prompts, params)
        compiled = {"warm_up_s": round(warm_up.seconds, 3), **report.programs()}
        before = dataclasses.replace(llm.stats)
        clocks, num_output = [], []
        for _ in range(reps):
            clock, num_tokens = _run(llm, prompts, params)
            clocks.append(clock)
            num_output.append(num_tokens)
        return {
            **report.speeds(clocks, sum(map(len, prompts)), statistics.median_low(num_output)),
            "outputs_ok": set(num_output) == {sum(one.n * (one.max_tokens or 0) for one in params)},
            "num_requests": len(workload),
            "num_sequences": sum(one.n for one in params),
            **_counts(llm, before, reps),
            **cold_start,
            **compiled,
            "num_programs_while_measured": compile_clock.num_programs - compiled["num_programs"],
            **report.setting(llm, model),
        }


def _run(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> tuple[LoadClock, int]:
    """One run with an empty prefix cache: its time, and the tokens of output."""
    llm.reset_prefix_cache()
    with LoadClock() as clock:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return clock, sum(len(one.token_ids) for output in outputs for one in output.outputs)


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
