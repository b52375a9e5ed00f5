"""Parts `step` and `generate`: the whole engine, on models with random weights.

A decode step is held against what the device needs to read and compute, a batch from its prompts to
its last tokens against transformers' `generate` on the same device.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gpu.measuring import Budget, Device, Effort, reason, rounded
from gpu.models import CONFIGS, step_bytes, step_flops, write_config

from jpaged import LLM, SamplingParams

HF_GENERATE = Path(__file__).with_name("hf_generate.py")
NUM_DECODE_STEPS = 16  # of a window: the host's work lies between windows

# (model, rows, tokens of context)
_STEPS = (
    ("Llama-3.2-1B", 64, 1024),
    ("Llama-3.1-8B", 64, 1024),
    ("Llama-3.1-8B", 1, 1024),
)
# (model, rows, tokens of prompt, new tokens)
_BATCHES = (("Llama-3.2-1B", 32, 512, 128), ("Llama-3.1-8B", 32, 512, 128))


def step(device: Device, effort: Effort, budget: Budget) -> Iterator[dict[str, Any]]:
    """A decode step of the engine: windows as it runs them, from the host's plan to its reading."""
    cases = (("tiny", 2, 16),) if effort.is_smoke else _STEPS
    implementations = ("pallas",) if effort.is_smoke else ("auto", "xla")
    for name, num_rows, context in cases:
        told = {"case": f"{name}, {num_rows} x {context:,}"}
        for implementation in implementations:
            budget.check()
            try:
                figures = _measure_step(name, num_rows, context, implementation, device, effort)
            except Exception as error:  # another model may run
                figures = {"implementation": implementation, "error": reason(error)}
            yield {**told, **figures}


def _measure_step(
    name: str, num_rows: int, context: int, implementation: str, device: Device, effort: Effort
) -> dict[str, Any]:
    num_tokens = 2 * NUM_DECODE_STEPS if effort.is_smoke else 8 * NUM_DECODE_STEPS
    with _open(name, num_rows, context + num_tokens, implementation) as llm:
        _serve(llm, num_rows, context, num_tokens)  # compiles
        seconds = _seconds_per_step(llm, num_rows, context, num_tokens)
        mean = context + num_tokens // 2
        work = {"num_rows": num_rows, "context": mean}
        return {
            "implementation": llm.engine.config.implementation,
            **device.figures(
                seconds, num_bytes=step_bytes(name, **work), num_flops=step_flops(name, **work)
            ),
            "tokens_per_s": rounded(num_rows / seconds),
        }


def generate(device: Device, effort: Effort, budget: Budget) -> Iterator[dict[str, Any]]:
    """A batch of equal prompts, all at once; transformers first, while the memory is free."""
    del device
    cases = (("tiny", 2, 16, 32),) if effort.is_smoke else _BATCHES
    implementation = "pallas" if effort.is_smoke else "auto"
    theirs = {case: _transformers(case, budget) for case in cases if budget.left > 0}
    for case, told in theirs.items():
        name, num_rows, prompt_len, num_new = case
        row = {"case": f"{name}, {num_rows} x ({prompt_len} + {num_new})", "transformers": told}
        try:
            with _open(name, num_rows, prompt_len + num_new, implementation) as llm:
                _serve(llm, num_rows, prompt_len, num_new)
                seconds = _serve(llm, num_rows, prompt_len, num_new)
        except Exception as error:  # another model may run
            yield {**row, "error": reason(error)}
            continue
        row["tokens_per_s"] = rounded(num_rows * num_new / seconds)
        if isinstance(told, float):
            row["times_as_fast_as"] = {"transformers": round(row["tokens_per_s"] / told, 3)}
        yield row


def _transformers(case: tuple[str, int, int, int], budget: Budget) -> float | str:
    """Tokens per second, or why there are none."""
    name, num_rows, prompt_len, num_new = case
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(name, Path(folder))
        numbers = [str(x) for x in (num_rows, prompt_len, num_new, 1)]
        command = [sys.executable, str(HF_GENERATE), str(config), *numbers]
        try:
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=max(budget.left, 1)
            )
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip().splitlines() or [f"ended with {error.returncode}"]
            return said[-1][:300]
        except subprocess.TimeoutExpired:
            return "no time left"
    return rounded(num_rows * num_new / json.loads(done.stdout.splitlines()[-1])["seconds"])


def _open(name: str, num_rows: int, length: int, implementation: str) -> LLM:
    """An engine of a model without a checkpoint, for rows of that many tokens."""
    assert length <= CONFIGS[name]["max_position_embeddings"]
    with tempfile.TemporaryDirectory() as folder:
        return LLM(
            write_config(name, Path(folder)),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            implementation=implementation,
            max_model_len=length,
            max_num_seqs=num_rows,
            num_decode_steps=NUM_DECODE_STEPS,
            enable_prefix_caching=False,
        )


def _add(llm: LLM, num_rows: int, prompt_len: int, num_new: int) -> list[Any]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, llm.model_config.vocab_size, (num_rows, prompt_len)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    requests = llm.intake.accept(prompts, [params] * num_rows)
    for request in requests:
        llm.engine.add(request)
    return requests


def _serve(llm: LLM, num_rows: int, prompt_len: int, num_new: int) -> float:
    """Seconds of a batch, from its prompts to its last tokens."""
    requests = _add(llm, num_rows, prompt_len, num_new)
    start = time.perf_counter()
    while llm.engine.has_unfinished:
        llm.engine.step()
    seconds = time.perf_counter() - start
    assert _num_output(requests) == num_rows * num_new
    return seconds


def _seconds_per_step(llm: LLM, num_rows: int, prompt_len: int, num_new: int) -> float:
    """Seconds per token of a row, from where all prompts are read to where a row ends."""
    requests = _add(llm, num_rows, prompt_len, num_new)
    while min(len(request.samples[0].output_ids) for request in requests) == 0:
        llm.engine.step()
    before, start = _num_output(requests), time.perf_counter()
    after, seconds = before, 0.0
    while llm.engine.has_unfinished:
        llm.engine.step()
        if all(not request.is_finished for request in requests):
            after, seconds = _num_output(requests), time.perf_counter() - start
    return seconds / ((after - before) / num_rows)


def _num_output(requests: list[Any]) -> int:
    return sum(len(request.samples[0].output_ids) for request in requests)
