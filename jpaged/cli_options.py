"""The options of the command line: their names, kinds and help, and how sizes are written.

Names are vLLM's where it has them. An option that is not given leaves no trace: its default is
decided by the configuration it belongs to.
"""

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any, NoReturn

from jpaged.config import CacheConfig, EngineConfig
from jpaged.sampling_params import SamplingParams

BAD_INPUT = 2
GENERATION_FILE = "generation_config.json"

ENGINE_NAMES = {field.name for field in dataclasses.fields(EngineConfig)} - {"cache"} | {
    field.name for field in dataclasses.fields(CacheConfig)
}
SAMPLING_NAMES = {field.name for field in dataclasses.fields(SamplingParams)} - {"seed"}
GOALS = ("ttft", "tpot", "e2el")  # latencies, in vLLM's words
_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class Parser(argparse.ArgumentParser):
    """Tells a wrong argument in one line, and not after the usage of thirty options."""

    def error(self, message: str) -> NoReturn:
        """Leaves with the code of wrong input."""
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """What `generate` reads and writes."""
    group = parser.add_argument_group("prompts and answers")
    group.add_argument(
        "--prompts",
        required=True,
        type=Path,
        help=".txt: a prompt on each line; .jsonl: strings, or objects with prompt, "
        "prompt_token_ids or messages, and optionally id and sampling options",
    )
    group.add_argument("--out", type=output_path, help="a .jsonl file (default: text on stdout)")
    group.add_argument("--chat", action="store_true", help="take plain prompts as chat messages")
    group.add_argument("--tokenizer", help="a directory or GGUF file (default: the model's)")
    group.add_argument(
        "--skip-tokenizer-init", action="store_true", help="no tokenizer: token ids in and out"
    )
    group.add_argument(
        "--generation-config",
        type=generation_source,
        default="auto",
        metavar="SOURCE",
        help="sampling defaults: the model's (auto), the same for every model (vllm), or a folder "
        f"with {GENERATION_FILE}",
    )
    group.add_argument(
        "--override-generation-config",
        type=json_object,
        metavar="JSON",
        help="""values that win over them, such as '{"temperature": 0.5}'""",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Fields of `SamplingParams`."""
    group = parser.add_argument_group(
        "sampling", "What is left out comes from the model's defaults; a prompt's own values win."
    )
    _add(group, "--temperature", float, "0 is greedy")
    _add(group, "--top-p", float, "draw from the likeliest tokens of this share")
    _add(group, "--top-k", int, "draw from so many likeliest tokens; 0: all")
    _add(group, "--min-p", float, "draw from tokens this likely, relative to the likeliest")
    _add(group, "--presence-penalty", float, "taken off tokens that the output has")
    _add(group, "--frequency-penalty", float, "the same, for each time")
    _add(group, "--repetition-penalty", float, "divides logits of tokens in prompt and output")
    _add(group, "--max-tokens", int, "most tokens of an output")
    _add(group, "--min-tokens", int, "tokens before anything but length may stop an output")
    _add(group, "--n", int, "outputs for each prompt")
    _add(group, "--stop", str, "texts that end an output", nargs="+")
    _add(group, "--stop-token-ids", int, "tokens that end an output", nargs="+")
    _add(group, "--ignore-eos", None, "go on after the end of sequence", action="store_true")


def add_workload_options(parser: argparse.ArgumentParser, *, is_required: bool) -> None:
    """What a benchmark runs, and where its line of JSON goes besides stdout. is_required: a
    workload; without one there are random prompts."""
    parser.add_argument("--model", required=True, help="a Hugging Face directory or GGUF file")
    fallback = "" if is_required else " (default: random prompts)"
    parser.add_argument(
        "--workload", required=is_required, type=Path, help=f"a .jsonl file{fallback}"
    )
    parser.add_argument("--limit", type=positive, help="only the first requests")
    parser.add_argument(
        "--output-len", type=positive, help="tokens of every output, whatever the workload says"
    )
    parser.add_argument("--json-out", type=output_path, help="append the line to this file")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Fields of `EngineConfig` and its cache."""
    group = parser.add_argument_group("engine", "Sizes may be written as 1k (1000) or 1K (1024).")
    _add_capacity_options(group)
    _add(group, "--load-format", str, "auto, or dummy: random weights, for which a config will do")
    _add(
        group,
        "--enable-prefix-caching",
        None,
        "share the KV of equal prefixes (default)",
        action=argparse.BooleanOptionalAction,
    )
    _add(group, "--seed", int, "seeds all draws")
    _add(group, "--num-decode-steps", int, "tokens made on the device between two plans")
    _add(group, "--deterministic", None, "the same bits in any batch", action="store_true")
    _add(group, "--implementation", str, "auto, xla, native (a CPU) or pallas (a GPU)")
    _add(group, "--compilation-cache-dir", str, "for compiled programs; '' keeps none")
    _add(group, "--warm-up", str, "compile programs ahead: off, before or background")


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """What `plan` is told of the devices, and the engine's options that count."""
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--device",
        required=True,
        help="a100-40g, a100-80g, h100, h200, l4 or another name, or its memory, such as 24G",
    )
    for name in ("tensor", "pipeline"):
        group.add_argument(
            f"--{name}-parallel-size",
            type=positive,
            default=1,
            metavar="SIZE",
            help=f"devices of {'a stage' if name == 'tensor' else 'the pipeline'} (default 1)",
        )
    group = parser.add_argument_group("engine", "Sizes may be written as 1k (1000) or 1K (1024).")
    _add_capacity_options(group)


def _add_capacity_options(group: Any) -> None:
    _add(group, "--dtype", str, "auto, bfloat16, float16 or float32")
    _add(group, "--quantization", str, "of matrices: int8, int4, or gguf (as a GGUF file has them)")
    _add(
        group,
        "--max-model-len",
        read_model_len,
        "most tokens of prompt and output together: by default what the model can; auto (or -1): "
        "as much of that as one request can have of the KV cache",
    )
    _add(group, "--max-num-seqs", read_size, "most sequences at a time")
    _add(group, "--max-num-batched-tokens", read_size, "most tokens of a step")
    _add(group, "--block-size", int, "tokens of a block of the KV cache (default 16)")
    _add(
        group,
        "--kv-cache-dtype",
        str,
        "of the KV cache: auto (the weights'), bfloat16, float16, float32, fp8, fp8_e5m2, "
        "fp8_per_token_head or int8_per_token_head (int8)",
    )
    _add(
        group,
        "--gpu-memory-utilization",
        float,
        "share of a GPU's memory to use (default 0.92); a CPU gives 0.05 of its memory to the KV "
        "cache, or up to half of it where one request needs as much",
    )
    _add(
        group,
        "--kv-cache-memory-bytes",
        read_size,
        "size of the KV cache, such as 4G, whatever the utilization, on any device",
    )
    _add(group, "--watermark", float, "share of the blocks that admissions leave free")
    _add(
        group,
        "--num-gpu-blocks-override",
        read_size,
        "blocks of the KV cache, whatever memory there is, on any device",
    )


def _add(group: Any, flag: str, kind: Any, text: str, **options: Any) -> None:
    """An option that leaves no trace where it is not given: its default is decided elsewhere."""
    if kind is not None:
        options |= {"type": kind, "metavar": flag.lstrip("-").split("-")[-1].upper()}
    group.add_argument(flag, help=text, default=argparse.SUPPRESS, **options)


def read_size(text: str) -> int:
    """Reads 1000, 1k, 25.6k (decimal) and 1K (binary, whole numbers alone), as vLLM does."""
    match = re.fullmatch(r"(\d+)(\.\d+)?([kmgKMG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4096, 4k, 25.6k or 4K")
    whole, fraction, unit = match.groups()
    if fraction and not unit.islower():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; fractions go with the decimal units k, m and g"
        )
    return (
        round(float(f"{whole}{fraction}") * _FACTORS[unit])
        if fraction
        else (int(whole) * _FACTORS.get(unit, 1))
    )


def read_model_len(text: str) -> int | str:
    """A size, or `auto`, which vLLM also writes as -1."""
    return "auto" if text in ("auto", "-1") else read_size(text)


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def read_rate(text: str) -> float:
    """A number above 0, or inf."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, or inf, got {text!r}")
    return rate


def read_goal(text: str) -> tuple[str, float]:
    """A latency and the most that it may be, such as ttft:500, in ms."""
    name, _, limit = text.partition(":")
    if name not in GOALS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no goal; write NAME:MS, with {', '.join(GOALS)} for NAME"
        )
    return name, read_rate(limit)


def generation_source(text: str) -> str:
    """auto, vllm, or a folder with a file of defaults."""
    if text in ("auto", "vllm") or (Path(text) / GENERATION_FILE).is_file():
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither auto nor vllm nor a folder with {GENERATION_FILE}"
    )


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error.msg}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def output_path(text: str) -> Path:
    """A path that can be written to later: told now, and not after an hour's work."""
    path = Path(text)
    if path.is_dir():
        why = "is a directory"
    elif not path.parent.is_dir():
        why = f"{path.parent} is no directory"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "it is read-only, or not yours"
    else:
        return path
    raise argparse.ArgumentTypeError(f"can not write {path}: {why}")


def given(args: argparse.Namespace, names: set[str]) -> dict[str, Any]:
    """The options among `names` that were given."""
    return {name: value for name, value in vars(args).items() if name in names}
