"""What the workers of all peers share: the workload, clocks, and the line of figures.

Runs in the peer's own environment, so it imports nothing but Python's own. A worker hands over a
function that serves requests; all else, and with it what is measured when, is the same for all.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MOSTLY_PROMPT = 16  # prompt tokens to one of output, from which a workload is nearly all prompt
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NUM_CUTS = 3  # runs that end with the first token


class Request(NamedTuple):
    """One request of a workload; its end of sequence is ignored."""

    prompt_ids: list[int]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0


TINY = Request([1, 2, 3, 4], 1)


def read_workload(path: str | Path, limit: int | None = None) -> list[Request]:
    """The requests of a .jsonl file, or the first `limit`."""
    with Path(path).open(encoding="utf-8") as file:
        entries = [json.loads(line) for line in file if line.strip()]
    return [
        Request(**{name: entry[name] for name in Request._fields if name in entry})
        for entry in entries[:limit]
    ]


def is_single_stream(requests: Sequence[Request]) -> bool:
    """Whether there is never more than one sequence, so that what counts is ms per token."""
    return len(requests) == 1 and requests[0].n == 1 and requests[0].max_tokens > 1


def is_mostly_prompt(requests: Sequence[Request]) -> bool:
    """Whether what counts is how fast prompts are read."""
    return num_prompt_tokens(requests) >= MOSTLY_PROMPT * num_output_tokens(requests)


def num_prompt_tokens(requests: Sequence[Request]) -> int:
    """Of all requests, each prompt counted once."""
    return sum(len(one.prompt_ids) for one in requests)


def num_output_tokens(requests: Sequence[Request]) -> int:
    """Of all samples."""
    return sum(one.n * one.max_tokens for one in requests)


def cut(requests: Sequence[Request], max_tokens: int) -> list[Request]:
    """The same with outputs of so many tokens at most."""
    return [one._replace(max_tokens=min(one.max_tokens, max_tokens)) for one in requests]


def disguise(requests: Sequence[Request], key: int) -> list[Request]:
    """Requests of equal lengths whose prompts begin otherwise, below 8 for each key: what prefixes
    they share among themselves stays, but a prefix cache has none of those of another key."""
    largest = max(max(one.prompt_ids) for one in requests)

    def changed(token_id: int) -> int:
        return token_id ^ key if token_id | 7 <= largest else token_id

    return [one._replace(prompt_ids=list(map(changed, one.prompt_ids))) for one in requests]


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every worker takes."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--model", required=True)
    made.add_argument("--workload", required=True)
    made.add_argument("--dtype", required=True)
    made.add_argument("--limit", type=int)
    return made


def num_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def measure(
    args: argparse.Namespace,
    run: Callable[[Sequence[Request]], int],
    *,
    packages: Sequence[str],
    warms_up_whole: bool = False,
    **extra: Any,
) -> None:
    """Times a workload and prints a line of JSON.

    run: serves requests that come at once, and returns how many tokens it made. warms_up_whole:
    serve all of it once before, in disguise, as an engine needs that compiles or caches by shape;
    else its first requests, briefly.
    """
    requests = read_workload(args.workload, args.limit)
    run([TINY])
    cold_start = seconds_since_process_start()
    run(disguise(requests if warms_up_whole else cut(requests[:4], 4), 1))
    with Clock() as clock:
        num_made = run(requests)
    prompt, output = num_prompt_tokens(requests), num_output_tokens(requests)
    line = {
        "workload": Path(args.workload).stem,
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "output_tokens_per_s": round(output / clock.seconds, 2),
        "total_tokens_per_s": round((prompt + output) / clock.seconds, 2),
        "num_prompt_tokens": prompt,
        "num_output_tokens": output,
        "outputs_ok": num_made == output,
        "wall_s": round(clock.seconds, 3),
        "own_cpu_share": [round(clock.own_share, 3)],
        "other_cpu_share": [round(clock.other_share, 3)],
        "cold_start_s": round(cold_start, 2),
        **extra,
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
    if is_single_stream(requests) or is_mostly_prompt(requests):
        first_s = _seconds_to_first_tokens(run, cut(requests, 1))
        if is_mostly_prompt(requests):
            line["prompt_tokens_per_s"] = round(prompt / first_s, 2)
        if is_single_stream(requests):
            line["ms_per_output_token"] = round((clock.seconds - first_s) / (output - 1) * 1e3, 3)
    line["peak_rss_mib"] = round(peak_rss_mib(), 1)
    print(json.dumps(line), flush=True)


def _seconds_to_first_tokens(
    run: Callable[[Sequence[Request]], int], requests: Sequence[Request]
) -> float:
    seconds = []
    for turn in range(_NUM_CUTS):
        disguised = disguise(requests, 2 + turn)
        with Clock() as clock:
            run(disguised)
        seconds.append(clock.seconds)
    return statistics.median(seconds)


class Clock:
    """Between enter and exit: wall seconds, and the share of the machine's processor time that this
    process (`own_share`) and all others (`other_share`) took."""

    def __enter__(self) -> "Clock":
        self._own, self._busy = _own_seconds(), _busy_seconds()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started
        available = self.seconds * (os.cpu_count() or 1)
        own, busy = _own_seconds() - self._own, _busy_seconds() - self._busy
        self.own_share, self.other_share = own / available, max(busy - own, 0.0) / available


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _busy_seconds() -> float:
    """Processor seconds that anyone has used since the machine started, stolen ones included."""
    with Path("/proc/stat").open(encoding="ascii") as file:
        user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:9])
    return (user + nice + system + sum(interrupts)) / _TICKS_PER_S


def seconds_since_process_start() -> float:
    """Since the system started this process, so that the interpreter's start and imports count."""
    stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    started = int(stat.rpartition(")")[2].split()[19]) / _TICKS_PER_S
    return float(Path("/proc/uptime").read_text(encoding="ascii").split()[0]) - started


def peak_rss_mib() -> float:
    """The most memory that this process has held at a time; helpers it started do not count."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
