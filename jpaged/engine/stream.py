"""One request's outputs on their way from the engine's thread to the task that reads them.

Owns what was told and not yet read. A reader who is slow finds it joined to one output, so what
waits is never longer than the request's whole output. Knows nothing of the engine.
"""

import asyncio
import threading

from jpaged.engine.output import RequestOutput, join_outputs
from jpaged.engine.request import Request
from jpaged.sampling_params import RequestOutputKind


class Stream:
    """`tell` and `fail` are called in the engine's thread; `read` in the loop given, by one task.

    request: once it was judged. is_started: it was given a row. is_aborted: it is to end, though it
    may not have reached the engine yet.
    """

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.request: Request | None = None
        self.is_started = self.is_aborted = False
        self._loop, self._has_news = loop, asyncio.Event()
        self._lock = threading.Lock()
        self._told: list[RequestOutput] = []
        self._error: Exception | None = None
        self._is_woken = False  # the loop knows; once is enough until the reader has looked
        self._whole: RequestOutput | None = None  # all that was read, with CUMULATIVE

    def start(self, request: Request, empty: RequestOutput) -> None:
        """Takes the judged request, and its output as it is before there are tokens."""
        self.request = request
        if request.params.output_kind is RequestOutputKind.CUMULATIVE:
            self._whole = empty

    def tell(self, news: RequestOutput) -> bool:
        """Leaves news for the reader. False if the reader's loop was closed."""
        with self._lock:
            self._told.append(news)
            return self._wake()

    def fail(self, error: Exception) -> None:
        """Lets the reader meet an error, behind what was told."""
        with self._lock:
            self._error = error
            self._wake()

    def _wake(self) -> bool:
        if not self._is_woken:
            try:
                self._loop.call_soon_threadsafe(self._has_news.set)
            except RuntimeError:
                return False
            self._is_woken = True
        return True

    async def read(self) -> RequestOutput:
        """The next output, as the request's `output_kind` has it. Raises what `fail` was given."""
        while True:
            with self._lock:
                told, self._told, self._is_woken = self._told, [], False
                error = self._error
            if told:
                return self._joined(told)
            if error is not None:
                raise error
            await self._has_news.wait()
            self._has_news.clear()

    def _joined(self, told: list[RequestOutput]) -> RequestOutput:
        if self._whole is None:
            return told[0] if len(told) == 1 else join_outputs(told)
        self._whole = join_outputs([self._whole, *told])
        return join_outputs([self._whole])  # the reader may do with it what they like
