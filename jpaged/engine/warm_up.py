"""Programs compiled ahead of their first call, so that a request of a new shape does not wait.

One program at a time, in one thread, which knows shapes alone: it holds neither weights nor state.
"""

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

from jpaged.engine.calls import NamedCall, compile_ahead

logger = logging.getLogger(__name__)

_MOST_MAPS = 0.75  # share of the system's limit that programs compiled ahead may bring about
_TOO_MANY = "this process has mapped nearly as many pieces of memory as vm.max_map_count allows"
_EXIT_PATIENCE = 60.0  # seconds that an interpreter's exit waits for the program being compiled

_warm_ups: weakref.WeakSet["WarmUp"] = weakref.WeakSet()


class WarmUp:
    """Compiles calls in their order, `run` here or `start`ed in a thread of its own.

    calls: by name, of abstract arrays. An error is logged and ends it: those who need the programs
    compile them, and meet the error, if it lasts.
    """

    def __init__(self, calls: Iterable[NamedCall]) -> None:
        self._calls, self._must_stop = calls, threading.Event()
        # A daemon: one that was forgotten must not keep the interpreter from its end.
        self._thread = threading.Thread(target=self.run, name="jpaged-warm-up", daemon=True)
        self.num_compiled = 0

    def start(self) -> None:
        """Begins in the background; once."""
        _warm_ups.add(self)
        self._thread.start()

    def run(self) -> None:
        """Compiles until all is done, one fails, or it is told to stop."""
        started, current = time.perf_counter(), "the first program"
        try:
            for name, call in self._calls:
                if self._must_stop.is_set():
                    return
                if not _may_map_more():
                    logger.info("%s and those behind it wait for a request: %s", name, _TOO_MANY)
                    return
                current = name
                compile_ahead(call)
                self.num_compiled += 1
        except Exception as error:
            logger.warning(
                "warm-up ends, %s was not compiled ahead: %s", current, error, exc_info=True
            )
        else:
            logger.info(
                "%d programs are warm after %.1f s",
                self.num_compiled,
                time.perf_counter() - started,
            )

    def stop(self) -> None:
        """Tells it to end after the program that is being compiled. Does not wait."""
        self._must_stop.set()

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of what was started."""
        if self._thread.ident is not None:
            self._thread.join(timeout)


def _may_map_more() -> bool:
    """Whether the limit on a process's memory maps is far: at the limit it would crash, and each of
    XLA's programs for a CPU takes some forty maps a layer."""
    limit, maps = Path("/proc/sys/vm/max_map_count"), Path("/proc/self/maps")
    if not (limit.exists() and maps.exists()):
        return True
    with maps.open("rb") as file:
        return sum(1 for _ in file) < _MOST_MAPS * int(limit.read_text())


@atexit.register
def _stop_all() -> None:
    """An interpreter that ends in the middle of a compilation may crash."""
    warm_ups = list(_warm_ups)
    for warm_up in warm_ups:
        warm_up.stop()
    for warm_up in warm_ups:
        warm_up.join(_EXIT_PATIENCE)
