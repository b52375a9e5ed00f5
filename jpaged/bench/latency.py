"""Latency of one request at a time, or of a batch of them, with nothing else to do."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from jpaged import LLM
from jpaged.bench import report
from jpaged.bench.machine import LoadClock
from jpaged.bench.timing import RequestTimes, summarize
from jpaged.bench.workload import WorkItem
from jpaged.engine.compiled import compile_clock


def measure(
    model: str,
    batches: Sequence[Sequence[WorkItem]],
    *,
    num_iters: int,
    num_iters_warmup: int,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Serves batches one after the other, the requests of each at once.

    An iteration is all batches, each from an empty prefix cache. options: `LLM`'s. Returns figures
    that JSON can hold: latencies in ms over all requests of the measured iterations; tokens of one
    iteration, and speeds by the median one.
    """
    items = [item for batch in batches for item in batch]
    num_expected = sum(item.params.n * (item.params.max_tokens or 0) for item in items)
    with LLM(model, skip_tokenizer_init=True, **options) as llm:
        cold_start = report.first_token(llm, items[0].prompt_ids)
        for _ in range(num_iters_warmup):
            _iterate(llm, batches)
        compiled = report.programs()
        clocks, times = [], []
        for _ in range(num_iters):
            with LoadClock() as clock:
                times += _iterate(llm, batches)
            clocks.append(clock)
        num_output = sum(one.num_tokens for one in times)
        return {
            **summarize(times),
            **report.speeds(
                clocks, sum(len(item.prompt_ids) for item in items), num_output // num_iters
            ),
            "outputs_ok": num_output == num_expected * num_iters,
            "num_iters": num_iters,
            "num_requests": len(items),
            "batch_size": max(map(len, batches)),
            **cold_start,
            **compiled,
            "num_programs_while_measured": compile_clock.num_programs - compiled["num_programs"],
            **report.setting(llm, model),
        }


def _iterate(llm: LLM, batches: Sequence[Sequence[WorkItem]]) -> list[RequestTimes]:
    times = []
    for batch in batches:
        llm.reset_prefix_cache()
        times += _serve(llm, batch)
    return times


def _serve(llm: LLM, batch: Sequence[WorkItem]) -> list[RequestTimes]:
    """Looks for new tokens after each step of the engine, of which a window is one."""
    start = time.perf_counter()
    requests = llm.intake.accept(
        [item.prompt_ids for item in batch], [item.params for item in batch]
    )
    for request in requests:
        llm.engine.add(request)
    times = [RequestTimes(start) for _ in requests]
    while llm.engine.has_unfinished:
        llm.engine.step()
        now = time.perf_counter()
        for request, one in zip(requests, times, strict=True):
            for sample in request.samples:
                num_new = len(sample.output_ids) - one.num_tokens_of(sample.index)
                one.add(sample.index, num_new, now)
    return times
