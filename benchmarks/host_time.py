"""Where the wall time of an engine's thread goes, by stages: the host's own, and waiting.

The engine has no clock of its own: while something is measured here, its methods are replaced by
timed ones. What the device does is what the thread waits for in `block_until_ready`; all else is
the host's, dispatching too, although the device may compute meanwhile.
"""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax

from jpaged import LLM, AsyncEngine, RequestOutputKind, SamplingParams
from jpaged.engine.compiled import compile_clock
from jpaged.engine.device import Device
from jpaged.engine.engine import Engine
from jpaged.engine.output_text import OutputText
from jpaged.engine.reporter import Reporter
from jpaged.engine.worker import Worker

STAGES: dict[str, tuple[tuple[Any, str], ...]] = {
    "plan": ((Engine, "_plan"), (Engine, "_prefills"), (Engine, "_windows"), (Engine, "_admit")),
    "dispatch": tuple((Device, name) for name in ("match", "admit", "step", "window", "release")),
    "results": ((Engine, "_take_prefill"), (Engine, "_take_window"), (Engine, "_retire")),
    "detokenize": ((OutputText, "add"), (OutputText, "end"), (Reporter, "_text_of")),
    "tell": ((Worker, "_tell_all"),),
}
"""Methods by stage. A call's time is its own, without that of timed calls within."""

BUSY_SHARE = 0.9  # of the rows, taken when a step begins, for it to count


class StageClock:
    """Seconds of the engine's thread by stage, in steps with about `rows` rows taken, for which no
    program was compiled.

    all_seconds: by stage, of everything. seconds: of what counts. wall: of what counts, from the
    beginning of a step to that of the next. other_thread: whose processor time is stage "readers".
    """

    def __init__(self, rows: int, other_thread: int | None = None) -> None:
        self.all_seconds: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.wall, self.num_steps, self.num_tokens = 0.0, 0, 0
        self._rows, self._inner = rows, [0.0]
        self._num_programs = 0
        self._thread = 0  # the engine's
        self._mark: tuple[float, int, Counter[str]] | None = None  # where what counts began
        self._readers = other_thread and time.pthread_getcpuclockid(other_thread)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """While engines are timed."""
        with contextlib.ExitStack() as stack:
            for stage, methods in STAGES.items():
                for owner, name in methods:
                    timed = self._timed(stage, getattr(owner, name))
                    stack.enter_context(mock.patch.object(owner, name, timed))
            stack.enter_context(mock.patch.object(Engine, "step", self._marked(Engine.step)))
            wait = self._timed("wait", jax.block_until_ready)
            read = self._timed("read back", jax.device_get)
            stack.enter_context(mock.patch.object(jax, "device_get", lambda x: read(wait(x))))
            yield

    def _timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - started
                self.all_seconds[stage] += spent - self._inner.pop()
                self._inner[-1] += spent

        return timed

    def _marked(self, step: Callable[[Engine], Any]) -> Callable[[Engine], Any]:
        def marked(engine: Engine) -> Any:
            self._thread = threading.get_ident()
            if self._readers:
                self.all_seconds["readers"] = time.clock_gettime(self._readers)  # pyright: ignore
            now, num_tokens = time.perf_counter(), engine.stats.num_decode_tokens
            num_programs = compile_clock.num_programs
            # A program that is compiled in the middle is no cost of steps.
            if self._mark is not None and num_programs == self._num_programs:
                started, num_before, before = self._mark
                self.wall += now - started
                self.num_steps += 1
                self.num_tokens += num_tokens - num_before
                self.seconds.update({k: v - before[k] for k, v in self.all_seconds.items()})
            self._num_programs = num_programs
            is_busy = len(engine.roster.running) >= BUSY_SHARE * self._rows
            self._mark = (now, num_tokens, self.all_seconds.copy()) if is_busy else None
            return step(engine)

        return marked


def measure_generate(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], rows: int
) -> dict[str, Any]:
    """Of `LLM.generate`, which makes texts when all is done: their time is that of as many tokens
    as the steps that count have made."""
    clock = StageClock(rows)
    with clock.attached():
        outputs = llm.generate(prompts, params, use_tqdm=False)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    texts = clock.all_seconds["detokenize"] / num_tokens * clock.num_tokens
    clock.seconds["detokenize"] += texts
    clock.wall += texts
    return {"texts": "at the end", **summary(clock, rows)}


def measure_stream(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], rows: int
) -> dict[str, Any]:
    """Of an `AsyncEngine` whose readers are told of every window. Closes the LLM."""
    clock = StageClock(rows, threading.get_ident())
    streamed = [dataclasses.replace(one, output_kind=RequestOutputKind.DELTA) for one in params]
    with clock.attached():
        asyncio.run(_read_all(llm, prompts, streamed))
    return {"texts": "streamed", **summary(clock, rows)}


async def _read_all(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> None:
    async def read(engine: AsyncEngine, prompt: list[int], one: SamplingParams) -> None:
        async for _ in engine.generate(prompt, one):
            pass

    async with AsyncEngine(llm) as engine:
        await asyncio.gather(*(read(engine, *pair) for pair in zip(prompts, params, strict=True)))


def summary(clock: StageClock, rows: int) -> dict[str, Any]:
    """Shares of the wall time: of each stage, and of all that is the host's own."""
    assert clock.wall, f"{rows} rows were never busy at once"
    waited, readers = clock.seconds.pop("wait"), clock.seconds.pop("readers", 0.0)
    stages = {name: clock.seconds[name] for name in (*STAGES, "read back")}
    stages["rest"] = clock.wall - waited - sum(stages.values())
    return {
        "rows": rows,
        "engine_steps": clock.num_steps,
        "tokens": clock.num_tokens,
        "wall_s": round(clock.wall, 3),
        "host_share": round(1 - waited / clock.wall, 4),
        "stages": {name: round(value / clock.wall, 5) for name, value in stages.items()},
        "readers": round(readers / clock.wall, 5),  # of a processor, in a thread of their own
    }
