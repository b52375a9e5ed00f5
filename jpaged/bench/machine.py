"""What a benchmark must know of its machine: processors, memory, and who else is at work.

A speed means little if others took the processors meanwhile; their share stands beside it. Where
the system does not tell (elsewhere than on Linux), a figure is None.
"""

import os
import resource
import sys
import time
from pathlib import Path
from types import TracebackType


def num_cpus() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_rss_mib() -> float:
    """The most memory that this process has held at a time, in MiB."""
    # getrusage would tell of the parent as well, whose peak a child inherits on Linux.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def seconds_since_process_start() -> float | None:
    """Since the system started this process, so that the interpreter's start and imports count."""
    stat, uptime = Path("/proc/self/stat"), Path("/proc/uptime")
    if not (stat.exists() and uptime.exists()):
        return None
    # The program's name, in brackets, may hold spaces; the start is the 20th field after it.
    fields = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return float(uptime.read_text(encoding="ascii").split()[0]) - started


class LoadClock:
    """Between enter and exit: wall seconds, and the share of the machine's processor time that
    this process (`own_share`) and all others (`other_share`) took."""

    def __enter__(self) -> "LoadClock":
        self._busy, self._own = _busy_seconds(), _own_seconds()
        self._started = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds = time.perf_counter() - self._started
        available = self.seconds * (os.cpu_count() or 1)
        own, busy = _own_seconds() - self._own, _busy_seconds()
        self.own_share = own / available
        self.other_share: float | None = None
        if busy is not None and self._busy is not None:
            self.other_share = max(busy - self._busy - own, 0.0) / available


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _busy_seconds() -> float | None:
    """Processor seconds that anyone has used since the machine started."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    values = stat.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    ticks = dict(zip(names, map(int, values), strict=True))
    return (sum(ticks.values()) - ticks["idle"] - ticks["iowait"]) / os.sysconf("SC_CLK_TCK")
