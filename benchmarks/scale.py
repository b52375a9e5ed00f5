"""How the engine scales: with rows, with the context, and how much of a step is the host's own.

    JAX_PLATFORMS=cpu python -m benchmarks.scale --model HF_DIRECTORY --part batch

Parts, each of a few minutes on two cores:

- batch: output tokens/s of 1 to 256 rows at one context.
- context: ms per decoded token, and per prompt token, by the length of the context.
- host, stream: where the wall time of the engine's thread goes with 256 rows busy and others
  waiting, in `LLM.generate`, which makes texts at the end, and in `AsyncEngine`.
- plot: draws docs/scale.svg from what the others have left in benchmarks/results.

For the first two, prompts are read in a run for one token each; then all rows find them in the
prefix cache, start together and decode in windows, of which the median counts. Times are those of
`Engine.step`, planning and read-back included.
"""

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.host_time import measure_generate, measure_stream
from jpaged import LLM, SamplingParams
from jpaged.bench.machine import LoadClock
from jpaged.bench.report import load, setting
from jpaged.engine.compiled import compile_clock

ROOT = Path(__file__).resolve().parent.parent
BLOCK_SIZE, NUM_WINDOWS = 16, 4


class Sizes(NamedTuple):
    """What the parts measure; a test takes less of everything."""

    rows: Sequence[int] = (1, 4, 16, 64, 256)
    context: int = 256  # of the batch part
    contexts: Sequence[int] = (128, 256, 512, 1024, 2048, 4096, 8192)
    context_rows: int = 8
    host_rows: int = 256
    host_requests: int = 400
    host_len: int = 48  # most tokens of a prompt; outputs have two to three times as many
    rounds: int = 3


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="for all parts but plot")
    parser.add_argument("--part", required=True, choices=[*PARTS, "plot"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--implementation", default="auto")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--figure", type=Path, default=ROOT / "docs" / "scale.svg")
    args = parser.parse_args(argv)
    files = {part: args.results / f"scale_{part}.json" for part in PARTS}
    if args.part == "plot":
        from benchmarks.scale_plot import draw  # matplotlib is for this part alone

        draw({part: json.loads(file.read_text()) for part, file in files.items()}, args.figure)
        return
    if args.model is None:
        parser.error(f"--part {args.part} needs --model")
    options = {"dtype": args.dtype, "implementation": args.implementation}
    found = PARTS[args.part](args.model, options, Sizes())
    args.results.mkdir(parents=True, exist_ok=True)
    files[args.part].write_text(json.dumps(found, indent=1) + "\n")


# --- rows and contexts ---


def batch_part(model: str, options: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """ms of a step and output tokens/s, by the number of rows."""
    lines, most = [], max(sizes.rows)
    with make_llm(model, options, sizes.context, most) as llm, LoadClock() as clock:
        prompts = draw_prompts(llm, most, sizes.context)
        read(llm, prompts)
        for rows in sizes.rows:
            step_ms = decode_step_ms(llm, prompts[:rows], sizes.rounds)
            lines.append(
                {
                    "rows": rows,
                    "step_ms": round(step_ms, 2),
                    "output_tokens_per_s": round(rows / step_ms * 1e3, 1),
                }
            )
            print(json.dumps(lines[-1]), flush=True)
        about = setting(llm, model)
    return {"lines": lines, "context": sizes.context, **about, **load([clock])}


def context_part(model: str, options: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """ms per decoded token, and per prompt token, by the context.

    A prompt begins with the one before, which the cache has: what is read is its latter half.
    """
    lines, rows = [], sizes.context_rows
    with make_llm(model, options, max(sizes.contexts), rows) as llm, LoadClock() as clock:
        whole = draw_prompts(llm, rows, max(sizes.contexts))
        (other,) = draw_prompts(llm, 1, max(sizes.contexts), seed=1)
        for context in sizes.contexts:  # compiles
            read(llm, [other[: prompt_len(context)]])
        for context in sizes.contexts:
            prompts = [prompt[: prompt_len(context)] for prompt in whole]
            num_read, seconds = read(llm, prompts)
            decoded_ms = decode_step_ms(llm, prompts, sizes.rounds) / rows
            lines.append(
                {
                    "context": context,
                    "decoded_token_ms": round(decoded_ms, 3),
                    "prompt_token_ms": round(seconds / num_read * 1e3, 3),
                }
            )
            print(json.dumps(lines[-1]), flush=True)
        about = setting(llm, model)
    return {"lines": lines, "rows": rows, **about, **load([clock])}


def make_llm(
    model: str, options: dict[str, Any], context: int, rows: int, *, has_texts: bool = False
) -> LLM:
    """Room for all rows at that context, and for as much of others' that is only cached."""
    return LLM(
        model,
        skip_tokenizer_init=not has_texts,
        max_model_len=context,
        max_num_seqs=rows,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=2 * rows * -(-context // BLOCK_SIZE) + 1,
        warm_up="off",  # it would compile while others are timed
        **options,
    )


def prompt_len(context: int) -> int:
    """Of a prompt whose last windows end near the context: a token more than full blocks, so that
    it is all the cache lacks."""
    return (context - 8 * NUM_WINDOWS) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE + 1


def draw_prompts(llm: LLM, number: int, context: int, seed: int = 0) -> list[list[int]]:
    rng, ids = random.Random(seed), range(llm.model_config.vocab_size)
    return [rng.choices(ids, k=prompt_len(context)) for _ in range(number)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def read(llm: LLM, prompts: Sequence[Sequence[int]]) -> tuple[int, float]:
    """Has prompts read, for one token of output each: tokens that were not cached, and seconds."""
    before, started = llm.stats.num_prefill_tokens, time.perf_counter()
    llm.generate(prompts, greedy(1), use_tqdm=False)
    return llm.stats.num_prefill_tokens - before, time.perf_counter() - started


def decode_step_ms(llm: LLM, prompts: Sequence[Sequence[int]], rounds: int) -> float:
    """Milliseconds of a step in which each of these prompts decodes: the median of the windows of
    some rounds, behind one that compiles."""
    steps = llm.engine.config.num_decode_steps
    seconds: list[float] = []
    for turn in range(1 + rounds):
        for request in llm.intake.accept(prompts, greedy(1 + steps * NUM_WINDOWS)):
            llm.engine.add(request)
        while llm.engine.has_unfinished:
            before, started = llm.stats.num_decode_tokens, time.perf_counter()
            llm.engine.step()
            num_decoded = llm.stats.num_decode_tokens - before
            if turn and num_decoded:
                assert num_decoded == steps * len(prompts), "rows did not decode together"
                seconds.append(time.perf_counter() - started)
    assert len(seconds) == rounds * NUM_WINDOWS
    return statistics.median(seconds) / steps * 1e3


# --- the host's time ---


def host_part(model: str, options: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Where the time of steps goes while all rows are busy."""
    return _host_part(measure_generate, model, options, sizes)


def stream_part(model: str, options: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """The same where texts are made while they grow."""
    return _host_part(measure_stream, model, options, sizes)


def _host_part(
    measure: Callable[..., dict[str, Any]], model: str, options: dict[str, Any], sizes: Sizes
) -> dict[str, Any]:
    length = sizes.host_len
    llm = make_llm(model, options, 4 * length, sizes.host_rows, has_texts=True)
    with llm, LoadClock() as clock:
        rng, ids = random.Random(0), range(llm.model_config.vocab_size)
        prompts = [
            rng.choices(ids, k=rng.randint(length // 4, length)) for _ in range(sizes.host_requests)
        ]
        params = [
            dataclasses.replace(greedy(rng.randint(2 * length, 3 * length)), detokenize=True)
            for _ in prompts
        ]
        about = setting(llm, model)
        llm.generate(prompts, params, use_tqdm=False)  # compiles
        llm.reset_prefix_cache()
        num_programs = compile_clock.num_programs
        found = measure(llm, prompts, params, sizes.host_rows)
        found["num_programs_while_measured"] = compile_clock.num_programs - num_programs
        print(json.dumps(found), flush=True)
    return {**found, **about, **load([clock])}


PARTS = {"batch": batch_part, "context": context_part, "host": host_part, "stream": stream_part}

if __name__ == "__main__":
    main()
