"""Everything that only a GPU can tell, in one command.

    python scripts/gpu_check.py                        # all parts, within 9 minutes
    python scripts/gpu_check.py --only decode prefill  # these, once more
    JAX_PLATFORMS=cpu python scripts/gpu_check.py --smoke --out smoke.json

Parts, in their order:

    device    what the device copies and multiplies: all others are held against it
    correct   every kernel case, compiled, against a float64 reference in NumPy
    decode    attention of one query per row; beside XLA, jax's own kernel, cuDNN and torch
    prefill   attention of prompts, beside the same and flex_attention
    pool      keys and values written, blocks copied
    products  rows times weights of 8 and 4 bits
    step      a decode step of the engine, models with random weights
    generate  the engine beside transformers' generate, from prompts to last tokens

Each runs in a process of its own, so that what one breaks on the device does not last, and its rows
are in the results' file as they come. A second call goes on where the first one ended: parts that
are done are left out unless they are named. Ends with 1 if a part failed or a kernel was wrong.
"""

import argparse
import contextlib
import functools as ft
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu.results import Results, lines_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SECONDS = 525  # of all parts together, the start and end of processes included
SECONDS_OF = {
    "device": 45,
    "correct": 200,
    "decode": 100,
    "prefill": 100,
    "pool": 45,
    "products": 75,
    "step": 150,
    "generate": 150,
}
"""The most that a part may take."""
OUT_OF_TIME = 75  # the exit code of a part that would go on: sysexits' EX_TEMPFAIL
_GO_ON = ("correct",)  # where an earlier run was stopped; others measure all cases in one run
_SPARE = 20  # a part ends by itself so many seconds before it would be ended

Part = Callable[..., Iterator[dict[str, Any]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts that are asked for, or one of them as a child. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECONDS_OF, metavar="PART", help="these parts")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; on a CPU, interpreted")
    parser.add_argument("--out", type=Path, help="the results' file (default: by date)")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"of all (default {SECONDS})"
    )
    parser.add_argument("--part", choices=SECONDS_OF, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    path = args.out or RESULTS / f"gpu_{time.strftime('%Y-%m-%d')}.json"
    if args.part:
        return run_part(args.part, Results(path), is_smoke=args.smoke, seconds=args.seconds)
    end = time.monotonic() + args.seconds
    parts = args.only or list(SECONDS_OF)
    if "device" not in parts:
        parts = ["device", *parts]
    for part in parts:
        results = Results(path)
        if results.is_done(part) and part not in (args.only or ()):
            continue
        seconds = min(SECONDS_OF[part], end - time.monotonic())
        if seconds <= _SPARE:
            print(f"no time left for {part}: call again, and it goes on from there", flush=True)
            continue
        results.begin(part, anew=part in (args.only or ()) or part not in _GO_ON)
        error, took = run_child(part, path, seconds, is_smoke=args.smoke)
        results = Results(path)
        results.finish(part, took, error)
        print(*lines_of(part, results.parts[part]), sep="\n", flush=True)
    return 0 if is_good(Results(path), parts) else 1


def is_good(results: Results, parts: Sequence[str]) -> bool:
    """Whether all parts are done, and every case that is judged was right."""
    rows = [row for part in parts for row in results.rows(part)]
    is_whole = all(results.is_done(part) for part in parts)
    return is_whole and not any("error" in row or row.get("is_right") is False for row in rows)


def run_child(part: str, path: Path, seconds: float, *, is_smoke: bool) -> tuple[str | None, float]:
    """Runs a part in a process of its own: what went wrong, if anything did, and the seconds."""
    command = [sys.executable, __file__, "--part", part, "--out", str(path)]
    command += ["--seconds", str(seconds - _SPARE), *(["--smoke"] if is_smoke else [])]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"XLA_CLIENT_MEM_FRACTION": "0.9", **os.environ, "PYTHONPATH": paths}
    if part not in ("step", "generate"):  # others' libraries need memory beside JAX
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:  # a pipe stays open while any child of its has it
        process = subprocess.Popen(command, stderr=said, env=environment, process_group=0)
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return "it took too long", time.monotonic() - start
        finally:
            _end_group(process)
        said.seek(0)
        told = said.read()[-1500:]
    took = time.monotonic() - start
    if code == OUT_OF_TIME:
        return "no time left for the rest", took
    return f"ended with {code}: {told}" if code else None, took


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it began: torch compiles in processes of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_part(part: str, results: Results, *, is_smoke: bool, seconds: float) -> int:
    """Runs a part in this process, adding its rows to the results. Returns the exit code."""
    from gpu import measuring

    effort = measuring.Effort.smoke() if is_smoke else measuring.Effort()
    if part == "device":
        results.add(part, measuring.measure_device(effort))
        return 0
    device = measuring.device_of(results.rows("device")[0])
    run = part_named(part, known={row["case"] for row in results.rows(part)})
    try:
        for row in run(device, effort, measuring.Budget(seconds)):
            results.add(part, row)
    except measuring.OutOfTimeError:
        return OUT_OF_TIME
    return 0


def part_named(name: str, *, known: set[str]) -> Part:
    """What runs a part. known: cases that an earlier run has judged. Imported late: each needs
    libraries of its own."""
    if name in ("decode", "prefill"):
        from gpu import race_attention

        return getattr(race_attention, name)
    if name in ("step", "generate"):
        from gpu import engine_speed

        return getattr(engine_speed, name)
    if name == "pool":
        from gpu.race_pool import pool

        return pool
    if name == "products":
        from gpu.race_products import products

        return products
    from gpu.correctness import correct

    return ft.partial(correct, known=known)


if __name__ == "__main__":
    sys.exit(main())
