"""`AsyncEngine`: an `LLM` for asyncio. Requests come one by one, and outputs are streamed."""

import asyncio
import threading
import uuid
import warnings
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from jpaged.engine.intake import Prompt
from jpaged.engine.llm import LLM
from jpaged.engine.output import RequestOutput
from jpaged.engine.request import Request
from jpaged.engine.stream import Stream
from jpaged.engine.usage import Snapshot
from jpaged.engine.worker import Worker
from jpaged.errors import ConfigError, RequestError
from jpaged.sampling_params import SamplingParams
from jpaged.typing import Params

_NUM_JUDGES = 4  # threads that tokenize prompts and compile grammars


class AsyncEngine:
    """Serves requests of any number of tasks, event loops and threads, batched continuously.

    The engine runs in one thread, prompts are judged in a few others, and an event loop is never
    held up. Tokens are those of `LLM.generate` with the same seeds.

    llm: what to serve with. It belongs to this object from here on, and is closed with it.
    max_queued: requests that may wait for a row at once, beyond which they are refused; None: any
        number.

    Close it with `shutdown`, `close` or at the end of `async with`. Raises ConfigError.
    """

    def __init__(self, llm: LLM, *, max_queued: int | None = None) -> None:
        is_number = isinstance(max_queued, int) and not isinstance(max_queued, bool)
        if max_queued is not None and not (is_number and max_queued >= 1):
            raise ConfigError(f"max_queued must be a whole number from 1, got {max_queued!r}")
        self._llm, self._intake, self._reporter = llm, llm.intake, llm.reporter
        if llm.engine.config.warm_up is None:
            llm.engine.warm_up("background")
        self._ordinals = threading.Lock()
        self._judges = ThreadPoolExecutor(_NUM_JUDGES, thread_name_prefix="jpaged-intake")
        # The thread must not hold this object, or it could not be collected.
        self._worker = Worker(llm.engine, llm.reporter, max_queued)
        self._finalizer = weakref.finalize(self, _forgotten, self._worker)
        self._finalizer.atexit = False

    # --- requests ---

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes one prompt, and yields outputs while it does, the last of them `finished`.

        prompt: text, token ids, or a dict, as `LLM.generate` takes one. sampling_params: None takes
            the model's defaults. Their `output_kind` says what an output holds: all so far, the
            news since the last one, or the whole when it is finished; `stream_interval`, how many
            tokens of a sample lie between outputs, between its first and its end. What comes while
            the reader is busy is joined, so nothing piles up.
        request_id: no other live request's. None gives it one.

        The request ends when the generator is closed or its task cancelled. Raises RequestError if
        it can not be served, QueueFullError, EngineClosedError, and EngineDeadError with what the
        engine died of as its cause.
        """
        params = self._intake.own_params(sampling_params)
        stream = Stream(_checked_id(request_id), asyncio.get_running_loop())
        self._worker.register(stream)
        try:
            stream.start(*await self._judged(prompt, params, stream.request_id))
            self._worker.add(stream)
            while True:
                output = await stream.read()
                yield output
                if output.finished:
                    return
        finally:
            self._worker.drop(stream)

    def _judged(
        self, prompt: Prompt, params: SamplingParams, request_id: str
    ) -> Awaitable[tuple[Request, RequestOutput]]:
        with self._ordinals:
            ordinal = self._intake.take_ordinal()
        try:
            judged = self._judges.submit(self._judge, prompt, params, ordinal, request_id)
        except RuntimeError:
            self._worker.check()  # it was closed just now
            raise
        return asyncio.wrap_future(judged)

    def _judge(
        self, prompt: Prompt, params: SamplingParams, ordinal: int, request_id: str
    ) -> tuple[Request, RequestOutput]:
        """The request, and its output before there are tokens."""
        self._worker.check()
        request = self._intake.accept_stream(prompt, params, ordinal, request_id)
        return request, self._reporter.output_of(request)

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """Ends requests by their ids; rows and blocks are free when this returns. Their readers get
        a last output, of which what was not finished has the finish reason "abort". Ids of no live
        request are ignored."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await asyncio.wrap_future(self._worker.abort(request_ids))

    # --- the engine, between two steps ---

    async def update_params(self, params: Params) -> None:
        """Takes new weights, as `LLM.update_params`: live requests go on with them."""
        await self._call(lambda: self._llm.update_params(params))

    async def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests run."""
        return await self._call(self._llm.reset_prefix_cache)

    async def snapshot(self) -> Snapshot:
        """The engine now: who runs, how the block pool is used, and the counts so far."""
        return await self._call(self._llm.snapshot)

    async def _call(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._worker.call(function))

    # --- everything else ---

    def get_tokenizer(self) -> Any:
        """The tokenizer, with transformers' interface. Raises RequestError if there is none."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` takes when no parameters are given; a copy, to change at will."""
        return self._llm.get_default_sampling_params()

    @property
    def is_running(self) -> bool:
        """Whether it takes requests."""
        return self._worker.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine died of an error."""
        return self._worker.cause is not None

    def close(self) -> None:
        """Ends all requests with EngineClosedError, waits for the step that runs, and frees weights
        and KV cache. May be called twice, with or without an event loop, which it holds up."""
        self._finalizer.detach()
        self._worker.stop()
        self._judges.shutdown()
        self._worker.join()

    async def shutdown(self) -> None:
        """`close` that does not hold up the event loop."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown()


def _checked_id(request_id: str | None) -> str:
    if request_id is None:
        return uuid.uuid4().hex
    if not isinstance(request_id, str):
        raise RequestError(f"request_id must be a string or None, got {request_id!r:.80}")
    return request_id


def _forgotten(worker: Worker) -> None:
    # No waiting: a collection may happen anywhere, in that thread too.
    worker.stop()
    warnings.warn(
        "an AsyncEngine was not closed: call shutdown or close, or use `async with`",
        ResourceWarning,
        stacklevel=2,
    )
