"""`jpaged bench`: what each benchmark takes, and the lines of figures it gives.

Imports nothing heavy until a benchmark runs.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jpaged.cli_options import (
    add_engine_options,
    add_workload_options,
    output_path,
    positive,
    read_goal,
    read_rate,
)
from jpaged.errors import ConfigError

Result = dict[str, Any]


def add_benches(benches: Any) -> None:
    """Adds a parser for each benchmark, with its `measure(args, engine options)`."""
    throughput = benches.add_parser("throughput", help="tokens/s of a workload, as a line of JSON")
    throughput.set_defaults(measure=_throughput)
    throughput.add_argument("--reps", type=positive, default=1, help="measured runs (default 1)")
    latency = benches.add_parser("latency", help="ms of one request at a time, as a line of JSON")
    latency.set_defaults(measure=_latency)
    _add_latency_options(latency)
    serve = benches.add_parser("serve", help="ms and tokens/s of requests that come one by one")
    serve.set_defaults(measure=_serve)
    _add_serve_options(serve)
    memory = benches.add_parser("memory", help="waste and sharing of the KV cache, as JSON")
    memory.set_defaults(measure=_memory)
    memory.add_argument("--beam-width", type=positive, help="beam searches instead of samples")
    for parsed in (throughput, latency, serve, memory):
        add_workload_options(parsed, is_required=parsed is not latency)
        add_engine_options(parsed)
    kernels = benches.add_parser("kernels", help="ms of each op, a line of JSON for each case")
    kernels.set_defaults(measure=_kernels, workload=None)
    _add_kernel_options(kernels)


def _add_latency_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=positive, help="tokens of random prompts (default 32)")
    parser.add_argument("--batch-size", type=positive, default=1, help="requests at once")
    parser.add_argument("--num-iters", type=positive, default=10, help="measured (default 10)")
    parser.add_argument(
        "--num-iters-warmup", "--warmup-iters", type=positive, default=2, help="before (default 2)"
    )


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--request-rate",
        type=read_rate,
        default="inf",
        help="requests/s on average, as a Poisson process; inf (default): all at once",
    )
    parser.add_argument(
        "--goodput",
        type=read_goal,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="goals, such as ttft:500 tpot:50 e2el:9000: requests/s that meet them all",
    )


def _add_kernel_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="whose shapes to take (default: SmolLM2-135M's)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--reps", type=positive, default=20, help="least calls of each (default 20)"
    )
    parser.add_argument("--json-out", type=output_path, help="append the lines to this file")


def _throughput(args: argparse.Namespace, options: Result) -> Iterable[Result]:
    from jpaged.bench.throughput import measure

    yield measure(args.model, _workload(args), reps=args.reps, options=options)


def _latency(args: argparse.Namespace, options: Result) -> Iterable[Result]:
    if args.workload is not None and args.input_len is not None:
        raise ConfigError("--input-len is for random prompts; leave it out, or --workload")
    from jpaged.bench.latency import measure
    from jpaged.bench.workload import random_workload
    from jpaged.engine.serving import resolve_model

    size = args.batch_size
    needs_weights = options.get("load_format") != "dummy"
    if args.workload is None:
        workload = random_workload(
            args.limit or size,
            input_len=args.input_len or 32,
            output_len=args.output_len or 128,
            vocab_size=resolve_model(args.model, needs_weights=needs_weights).vocab_size,
            seed=options.get("seed", 0),
        )
    else:
        workload = _workload(args)
    yield measure(
        args.model,
        [workload[i : i + size] for i in range(0, len(workload), size)],
        num_iters=args.num_iters,
        num_iters_warmup=args.num_iters_warmup,
        options=options,
    )


def _serve(args: argparse.Namespace, options: Result) -> Iterable[Result]:
    from jpaged.bench.serve import measure

    yield measure(
        args.model,
        _workload(args),
        request_rate=args.request_rate,
        goodput=dict(args.goodput),
        options=options,
    )


def _memory(args: argparse.Namespace, options: Result) -> Iterable[Result]:
    from jpaged.bench.memory import measure

    yield measure(args.model, _workload(args), beam_width=args.beam_width, options=options)


def _kernels(args: argparse.Namespace, options: Result) -> Iterable[Result]:
    from jpaged.bench.kernels import Shape, measure
    from jpaged.engine.compiled import keep_programs
    from jpaged.engine.serving import resolve_model

    keep_programs(None)
    model = None if args.model is None else resolve_model(args.model, needs_weights=False)
    shape = Shape() if model is None else Shape.of(model)
    yield from measure(shape, dtype=options["dtype"], reps=args.reps)


def _workload(args: argparse.Namespace) -> Any:
    from jpaged.bench.workload import read_workload

    path: Path = args.workload
    return read_workload(path, args.limit, args.output_len)
