"""The command line: `jpaged generate`, `plan` and `bench`, with vLLM's option names.

Nothing heavy is imported before the arguments, and with `generate` the prompts, are judged. Exit
codes: 0, 1 for a plan that does not fit, 2 for a wrong argument or input, told in one line, and 130
after Ctrl-C.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import jpaged
from jpaged.bench.commands import add_benches
from jpaged.cli_options import (
    BAD_INPUT,
    ENGINE_NAMES,
    SAMPLING_NAMES,
    Parser,
    add_engine_options,
    add_plan_options,
    add_prompt_options,
    add_sampling_options,
    given,
    read_size,
)
from jpaged.config import CacheConfig, EngineConfig
from jpaged.engine.prompt_file import PromptLine, read_prompts
from jpaged.errors import ConfigError, JpagedError, RequestError
from jpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jpaged import LLM, RequestOutput

logger = logging.getLogger("jpaged.cli")

DOES_NOT_FIT = 1
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, without the program's name, and returns its exit code."""
    started = time.perf_counter()
    args = _parser().parse_args(argv)
    with _log_to_stderr():
        try:
            return args.run(args, started) or 0
        except JpagedError as error:
            print(f"jpaged: {error}", file=sys.stderr)
            return BAD_INPUT
        except KeyboardInterrupt:
            print("jpaged: interrupted", file=sys.stderr)
            return INTERRUPTED


# --- arguments ---


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="jpaged", description="Paged-attention LLM inference in JAX.")
    version = f"jpaged {jpaged.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="complete or answer a file of prompts")
    generate.set_defaults(run=_generate)
    generate.add_argument("model", help="a Hugging Face directory or a GGUF file")
    add_prompt_options(generate)
    add_sampling_options(generate)
    add_engine_options(generate)

    plan = commands.add_parser("plan", help="what a model needs and serves on given devices")
    plan.set_defaults(run=_plan)
    plan.add_argument("model", help="a config.json, a directory with one, or a GGUF file")
    plan.add_argument("--json", action="store_true", help="the plan as a line of JSON")
    add_plan_options(plan)

    bench = commands.add_parser("bench", help="measure speed and memory")
    benches = bench.add_subparsers(required=True, metavar="WHAT")
    bench.set_defaults(run=_bench)
    add_benches(benches)
    return parser


def engine_options(argv: Sequence[str]) -> dict[str, Any]:
    """The engine's options among a command line's arguments, as `EngineConfig` names them."""
    return given(_parser().parse_args(argv), ENGINE_NAMES)


# --- generate ---


def _generate(args: argparse.Namespace, started: float) -> None:
    lines = read_prompts(args.prompts, is_chat=args.chat)
    options, sampling = given(args, ENGINE_NAMES), given(args, SAMPLING_NAMES)
    EngineConfig.from_options(**options)
    for line in lines:
        _params_of(line, SamplingParams(), sampling)

    _let_allocator_have(options)
    import jax

    from jpaged import LLM
    from jpaged.engine.compiled import compile_clock

    with LLM(
        args.model,
        tokenizer=args.tokenizer,
        skip_tokenizer_init=args.skip_tokenizer_init,
        generation_config=args.generation_config,
        override_generation_config=args.override_generation_config,
        **options,
    ) as llm:
        logger.info("Engine ready %.1f s after the start", time.perf_counter() - started)
        folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
        logger.info(
            "Programs are compiled when first needed, which takes a while, and kept in %s",
            folder or "memory alone",
        )
        defaults = llm.get_default_sampling_params()
        params = [_params_of(line, defaults, sampling) for line in lines]
        prompts = [_prompt_of(line, llm) for line in lines]
        begun = time.perf_counter()
        try:
            outputs = llm.generate(prompts, params)
        except RequestError as error:
            if error.prompt_index is None:
                raise
            raise _at(lines[error.prompt_index], error) from error
        seconds = time.perf_counter() - begun
        first_token_at = llm.stats.first_token_at or begun
    logger.info(
        "%d programs were compiled, or read from that folder, in %.1f s",
        compile_clock.num_programs,
        compile_clock.seconds,
    )
    logger.info("First token %.1f s after the start", first_token_at - started)
    _log_speed(outputs, seconds)
    if args.out is None:
        _write_text(lines, outputs, sys.stdout)
    else:
        with args.out.open("w", encoding="utf-8") as file:
            _write_json(lines, outputs, file)
        logger.info("Wrote %d answers to %s", len(outputs), args.out)


def _params_of(
    line: PromptLine, defaults: SamplingParams, sampling: dict[str, Any]
) -> SamplingParams:
    """The defaults, changed by the command line's options, changed by the line's own."""
    try:
        return dataclasses.replace(defaults, **sampling | line.sampling)
    except RequestError as error:
        raise _at(line, error) from error


def _prompt_of(line: PromptLine, llm: "LLM") -> Any:
    if line.messages is None:
        return line.prompt
    try:
        return llm.preprocess_chat(line.messages)[0]
    except RequestError as error:
        raise _at(line, error) from error


def _at(line: PromptLine, error: RequestError) -> RequestError:
    return type(error)(f"{line.where}: {error}")


def _log_speed(outputs: Sequence["RequestOutput"], seconds: float) -> None:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    logger.info(
        "%d prompts of %d tokens, %d tokens of output in %.1f s: %.1f tokens/s of output",
        len(outputs),
        num_prompt,
        num_output,
        seconds,
        num_output / seconds,
    )


def _write_json(
    lines: Sequence[PromptLine], outputs: Sequence["RequestOutput"], file: TextIO
) -> None:
    for line, output in zip(lines, outputs, strict=True):
        record = {
            "id": line.id,
            "prompt": output.prompt,
            "outputs": [
                {
                    "text": one.text,
                    "token_ids": one.token_ids,
                    "finish_reason": one.finish_reason,
                    "stop_reason": one.stop_reason,
                }
                for one in output.outputs
            ],
            "num_cached_tokens": output.num_cached_tokens,
        }
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _write_text(
    lines: Sequence[PromptLine], outputs: Sequence["RequestOutput"], file: TextIO
) -> None:
    """For people: each prompt, and under it the answers; one cut short ends in [...]."""
    for line, output in zip(lines, outputs, strict=True):
        print(f">>> {line.title}", file=file)
        for one in output.outputs:
            text = one.text or " ".join(map(str, one.token_ids))
            print(text.strip() + (" [...]" if one.finish_reason == "length" else ""), file=file)
        print(file=file)


# --- plan ---


def _plan(args: argparse.Namespace, started: float) -> int:
    del started
    config = EngineConfig.from_options(**given(args, ENGINE_NAMES))

    from jpaged import loading
    from jpaged.engine.plan import Hardware, advice, make_plan
    from jpaged.engine.plan_text import as_json, as_table
    from jpaged.model_config import ModelConfig

    model = ModelConfig.from_hf(loading.load_hf_config_alone(args.model))
    dtype = loading.name_dtype(config.dtype, model.dtype)
    hardware = Hardware(
        device=args.device,
        device_bytes=_device_bytes(args.device),
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        dtype=dtype,
    )
    plan = make_plan(model, config, hardware)
    show = as_json if args.json else as_table
    print(show(plan, advice(model, config, hardware)))
    return 0 if plan.fits else DOES_NOT_FIT


def _device_bytes(name: str) -> int:
    from jpaged.engine.plan import DEVICES, GIB

    if name.lower() in DEVICES:
        return int(DEVICES[name.lower()] * GIB)
    try:
        return read_size(name)
    except argparse.ArgumentTypeError:
        raise ConfigError(
            f"device={name!r} is unknown; there are {', '.join(DEVICES)}, or give its memory, "
            "such as 24G"
        ) from None


# --- bench ---


def _bench(args: argparse.Namespace, started: float) -> None:
    del started
    options = given(args, ENGINE_NAMES)
    EngineConfig.from_options(**options)
    _let_allocator_have(options)
    for result in args.measure(args, options):
        line = json.dumps({"workload": args.workload and args.workload.stem, **result})
        print(line, flush=True)
        if args.json_out is not None:
            with args.json_out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


# --- the process ---


def _let_allocator_have(options: dict[str, Any]) -> None:
    """Has JAX, which is yet to start, reserve the share of a GPU that the engine is to use."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    if not any(os.environ.get(name) for name in names):
        share = options.get("gpu_memory_utilization", CacheConfig.gpu_memory_utilization)
        os.environ[names[0]] = str(share)


@contextlib.contextmanager
def _log_to_stderr() -> Iterator[None]:
    """The package's log goes to stderr while a command runs; a library's user sets up their own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%H:%M:%S"))
    ours = logging.getLogger("jpaged")
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
