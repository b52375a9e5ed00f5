"""The thread in which an engine runs: nothing else may call it.

Owns the order of what is asked of the engine, the streams of its live requests, and how they end
when the engine does. Knows nothing of prompts. The thread sleeps while there is nothing to do.
"""

import atexit
import contextlib
import functools
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from jpaged.engine.engine import Engine
from jpaged.engine.reporter import Reporter
from jpaged.engine.request import Request
from jpaged.engine.stream import Stream
from jpaged.errors import EngineClosedError, EngineDeadError, QueueFullError, RequestError

logger = logging.getLogger(__name__)

_EXIT_PATIENCE = 60.0  # seconds that an interpreter's exit waits for the step that runs

_workers: weakref.WeakSet["Worker"] = weakref.WeakSet()


class _Command(NamedTuple):
    """What to do between two steps, and who waits for its result."""

    function: Callable[[], Any]
    future: Future[Any] | None = None


class Worker:
    """Runs an engine, which is its own from here on, in a thread of its own.

    max_queued: requests that may be live without a row at once; None: any number.
    cause: what the engine died of, if it did.
    """

    def __init__(self, engine: Engine, reporter: Reporter, max_queued: int | None) -> None:
        self._engine, self._reporter, self._max_queued = engine, reporter, max_queued
        self.cause: BaseException | None = None
        self._is_stopping = False
        # A collection of garbage may drop a stream anywhere, where this lock is held too.
        self._lock = threading.RLock()  # guards what is put in here, and who is live
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._live: dict[str, Stream] = {}
        self._streams: dict[Request, Stream] = {}  # the thread's own
        # A daemon: one that was forgotten must not keep the interpreter from its end.
        self._thread = threading.Thread(target=self._run, name="jpaged-engine", daemon=True)
        _workers.add(self)
        self._thread.start()

    # --- what other threads call ---

    def check(self) -> None:
        """Raises EngineDeadError or EngineClosedError if it takes no more requests."""
        if (error := self._refusal()) is not None:
            raise error

    @property
    def is_running(self) -> bool:
        """Whether it takes requests."""
        return self._refusal() is None

    def register(self, stream: Stream) -> None:
        """Takes in a stream whose request is still to be judged. Raises as `check`, RequestError if
        its id is taken, and QueueFullError."""
        with self._lock:
            self.check()
            if stream.request_id in self._live:
                raise RequestError(
                    f"request_id={stream.request_id!r} is that of a request which has not ended; "
                    "give another one, or none"
                )
            limit = self._max_queued
            if limit is not None and self._num_queued() >= limit:
                raise QueueFullError(
                    f"max_queued={limit} requests are waiting; try again later, or start the "
                    "engine with more"
                )
            self._live[stream.request_id] = stream

    def add(self, stream: Stream) -> None:
        """Queues the request of a registered stream. Raises as `check`."""
        self._post(_Command(functools.partial(self._add, stream)))

    def drop(self, stream: Stream) -> None:
        """Ends a stream that nobody reads any more, if it has not ended."""
        with self._lock:
            if self._forget(stream) and stream.request is not None:
                self._commands.put(_Command(functools.partial(self._abort, stream)))

    def abort(self, request_ids: Sequence[str]) -> Future[None]:
        """Ends live requests; their readers get what there is, with the reason "abort"."""
        return self.call(functools.partial(self._abort_all, request_ids))

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Calls a function between two steps. Raises as `check`."""
        command = _Command(function, Future())
        self._post(command)
        assert command.future is not None
        return command.future

    def stop(self) -> None:
        """Tells the thread to end after the step that runs. Takes no lock."""
        self._is_stopping = True
        self._commands.put(_Command(lambda: None))

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread's end."""
        self._thread.join(timeout)

    def _refusal(self) -> EngineDeadError | EngineClosedError | None:
        if self.cause is not None:
            error = EngineDeadError(f"the engine died of {self.cause!r}; make a new one")
            error.__cause__ = self.cause
            return error
        if self._is_stopping:
            return EngineClosedError("this engine was closed; make a new one")
        return None

    def _num_queued(self) -> int:
        return sum(not stream.is_started for stream in list(self._live.values()))

    def _post(self, command: _Command) -> None:
        with self._lock:
            self.check()
            self._commands.put(command)

    def _forget(self, stream: Stream) -> bool:
        """Takes a stream off the live ones, if it is one."""
        with self._lock:
            is_live = self._live.get(stream.request_id) is stream
            if is_live:
                del self._live[stream.request_id]
            return is_live

    # --- the thread ---

    def _run(self) -> None:
        try:
            while self._obey():
                self._tell_all(self._engine.step())
        except BaseException as error:
            logger.exception("the engine died")
            self.cause = error
        finally:
            self._end()

    def _obey(self) -> bool:
        """Does what was asked, and sleeps while there is no step to run. False if it is to stop."""
        while not self._is_stopping:
            try:
                function, future = self._commands.get(block=not self._engine.has_unfinished)
            except queue.Empty:
                return True
            if future is None:
                function()
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
        return False

    def _add(self, stream: Stream) -> None:
        assert stream.request is not None
        self._streams[stream.request] = stream
        if stream.is_aborted:
            self._abort(stream)
        else:
            self._engine.add(stream.request)

    def _abort_all(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            stream = self._live.get(request_id)
            if stream is not None:
                self._abort(stream)

    def _abort(self, stream: Stream) -> None:
        stream.is_aborted = True
        request = stream.request
        if request in self._streams:
            self._end_request(request)
            self._tell(request, stream)

    def _end_request(self, request: Request) -> None:
        try:
            self._engine.abort([request])
        except Exception as error:
            logger.warning("rows were not released, all are computed again: %s", error)
            self._engine.abort_and_restart([request])

    def _tell_all(self, ended: Sequence[Request]) -> None:
        running = [sample.request for sample in self._engine.roster.running]
        for request in dict.fromkeys([*running, *ended]):
            if (stream := self._streams.get(request)) is not None:
                stream.is_started = True
                self._tell(request, stream)

    def _tell(self, request: Request, stream: Stream) -> None:
        """Tells a reader what is new. Without a reader, or words for it, the request ends."""
        try:
            news = self._reporter.news_of(request)
            is_read = news is None or stream.tell(news)
        except Exception as error:
            stream.fail(error)
            is_read = False
        if not is_read and not request.is_finished:
            self._end_request(request)
        if request.is_finished:
            del self._streams[request]
            self._forget(stream)

    def _end(self) -> None:
        """Gives all who wait the reason why nothing more comes, and frees the device memory."""
        with self._lock:
            self._is_stopping = True  # nothing is put in from here on
            streams = {*self._live.values(), *self._streams.values()}
            self._live, self._streams = {}, {}
        for stream in streams:
            error = self._refusal()
            assert error is not None
            stream.fail(error)
        while not self._commands.empty():
            future = self._commands.get().future
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(self._refusal())
        with contextlib.suppress(Exception):
            self._engine.close()


@atexit.register
def _stop_all() -> None:
    """An interpreter that ends in the middle of a device call may crash."""
    workers = list(_workers)
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.join(_EXIT_PATIENCE)
