"""Short ways to drive an `AsyncEngine` over the counting model from plain tests."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

from jpaged import AsyncEngine, RequestOutputKind, SamplingParams
from jpaged.core.state import check_invariants
from jpaged.engine.output import RequestOutput, join_outputs

PATIENCE = 60  # seconds until a test is taken to hang
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


async def outputs_of(engine: AsyncEngine, prompt, params, request_id=None) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, request_id)]


async def tokens_of(engine: AsyncEngine, prompt, params, request_id=None) -> list[int]:
    """The first sample's tokens, whatever the output kind."""
    outputs = await outputs_of(engine, prompt, params, request_id)
    return whole(outputs, params).outputs[0].token_ids


def whole(outputs: list[RequestOutput], params: SamplingParams) -> RequestOutput:
    """What a request's outputs tell in all."""
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return join_outputs(outputs) if params.output_kind is DELTA else outputs[-1]


async def check_idle(engine: AsyncEngine) -> None:
    """Nothing waits or runs, and all blocks are free."""
    inner = engine._llm.engine

    def check():
        assert not inner.has_unfinished
        assert inner.num_free_blocks == inner.num_blocks - 1
        assert len(inner.roster._free_rows) == inner.config.max_num_seqs
        check_invariants(inner._device.state)

    await engine._call(check)
    assert not engine._worker._live
    assert not engine._worker._streams


class Pace:
    """Lets an engine step only when its readers have read all: each output is of one step, and no
    request gets far ahead of its reader. Commands are obeyed all the same."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._worker, inner = engine._worker, engine._llm.engine
        self._step, inner.step = inner.step, self._paced_step

    def _may_step(self) -> bool:
        return not any(stream._told for stream in list(self._worker._streams.values()))

    def _paced_step(self):
        if self._may_step():
            return self._step()
        time.sleep(0.001)
        return []


class Gate(Pace):
    """Lets an engine take as many steps as it is told to, once so many requests have come."""

    num_steps = num_requests = 0

    def let(self, num_steps: float, *, num_requests: int = 0) -> None:
        self.num_requests, self.num_steps = num_requests, num_steps

    def _may_step(self) -> bool:
        may_step = self.num_steps > 0 and len(self._worker._streams) >= self.num_requests
        self.num_steps -= may_step
        return may_step


def threads() -> set[str]:
    """The engine's threads that are alive."""
    return {t.name for t in threading.enumerate() if t.name.startswith("jpaged")}
