"""Latency and throughput of requests that arrive as a Poisson process.

They are served by an `AsyncEngine` in this process: there is no HTTP between, and the reader of the
outputs shares the interpreter with the engine. What it reads is what a server would send.
"""

import asyncio
import dataclasses
import math
import random
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from jpaged import LLM, AsyncEngine, RequestOutputKind
from jpaged.bench import report
from jpaged.bench.machine import LoadClock
from jpaged.bench.timing import RequestTimes, summarize
from jpaged.bench.workload import WorkItem
from jpaged.engine.compiled import compile_clock

_MOST_WARM_UPS = 4


def measure(
    model: str,
    workload: Sequence[WorkItem],
    *,
    request_rate: float,
    goodput: Mapping[str, float],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Serves a workload several times, with the same arrivals and an empty prefix cache: until
    nothing is left to compile, then by the clock.

    request_rate: requests/s on average; `math.inf`: all at once. goodput: goals in ms by latency
    (ttft, tpot, e2el); requests that meet them all are counted per second. options: `LLM`'s; their
    seed draws the arrivals too. Returns figures that JSON can hold, latencies in ms. Time counts
    from when a request was due, whether or not it could start then.
    """
    waits = arrivals(len(workload), request_rate, options.get("seed", 0))
    # What is measured must not be compiled beside it; runs before it compile what it needs.
    llm = LLM(model, skip_tokenizer_init=True, **{"warm_up": "off", **options})
    figures = report.first_token(llm, workload[0].prompt_ids)
    return (
        figures
        | asyncio.run(_measure(llm, workload, waits, goodput))
        | {
            "request_rate": request_rate if math.isfinite(request_rate) else "inf",
            **report.setting(llm, model),
        }
    )


def arrivals(num_requests: int, request_rate: float, seed: int) -> list[float]:
    """Seconds from the start at which requests are due, with exponential gaps between."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(1) / request_rate for _ in range(num_requests)))


async def _measure(
    llm: LLM, workload: Sequence[WorkItem], waits: Sequence[float], goodput: Mapping[str, float]
) -> dict[str, Any]:
    async with AsyncEngine(llm) as engine:
        await _warm_up(engine, workload, waits)
        compiled = report.programs()
        before = (await engine.snapshot()).stats
        with LoadClock() as clock:
            times = await _serve(engine, workload, waits)
        after = (await engine.snapshot()).stats
    num_output = sum(one.num_tokens for one in times)
    num_expected = sum(item.params.n * (item.params.max_tokens or 0) for item in workload)
    num_good = sum(one.meets(goodput) for one in times)
    return {
        **summarize(times),
        "requests_per_s": round(len(workload) / clock.seconds, 3),
        "goodput": dict(goodput) or None,
        "good_requests_per_s": round(num_good / clock.seconds, 3) if goodput else None,
        **report.speeds([clock], sum(len(item.prompt_ids) for item in workload), num_output),
        "outputs_ok": num_output == num_expected,
        "num_requests": len(workload),
        "num_preemptions": after.num_preemptions - before.num_preemptions,
        "num_cached_prompt_tokens": after.num_cache_hits - before.num_cache_hits,
        **compiled,
        "num_programs_while_measured": compile_clock.num_programs - compiled["num_programs"],
    }


async def _warm_up(
    engine: AsyncEngine, workload: Sequence[WorkItem], waits: Sequence[float]
) -> None:
    """Which requests meet in a step is a matter of time, and so is what it compiles."""
    for _ in range(_MOST_WARM_UPS):
        num_before = compile_clock.num_programs
        await _serve(engine, workload, waits)
        await engine.reset_prefix_cache()
        if compile_clock.num_programs == num_before:
            return


async def _serve(
    engine: AsyncEngine, workload: Sequence[WorkItem], waits: Sequence[float]
) -> list[RequestTimes]:
    start = time.perf_counter()
    return await asyncio.gather(
        *(_read(engine, item, start + wait) for item, wait in zip(workload, waits, strict=True))
    )


async def _read(engine: AsyncEngine, item: WorkItem, due: float) -> RequestTimes:
    """Sends a request when it is due, and reads its outputs as they come."""
    params = dataclasses.replace(item.params, output_kind=RequestOutputKind.DELTA)
    times = RequestTimes(due)
    await asyncio.sleep(max(due - time.perf_counter(), 0))
    async for output in engine.generate(item.prompt_ids, params):
        now = time.perf_counter()
        for one in output.outputs:
            times.add(one.index, len(one.token_ids), now)
    return times
