"""A plan as a table for people, and as a line of JSON."""

import dataclasses
import json
from collections.abc import Iterator, Sequence

from jpaged.engine.plan import GIB, Plan


def as_json(plan: Plan, advice: Sequence[str]) -> str:
    """Every field of the plan by its name, the stages and the hardware as objects."""
    return json.dumps({**dataclasses.asdict(plan), "advice": list(advice)})


def as_table(plan: Plan, advice: Sequence[str]) -> str:
    """The plan, then what to know, then whether it fits and what to turn."""
    return "\n".join([*_head(plan), "", *_memory(plan), "", *_cache(plan), "", *_end(plan, advice)])


def _head(plan: Plan) -> Iterator[str]:
    hardware = plan.hardware
    matrices = f", matrices in {plan.quantization}" if plan.quantization else ""
    parameters = f"{_count(plan.num_parameters)} parameters in {hardware.dtype}{matrices}"
    yield f"{plan.architecture}, {parameters}"
    tp, pp = hardware.tensor_parallel_size, hardware.pipeline_parallel_size
    split = f", tensor parallel {tp}, pipeline parallel {pp}" if tp * pp > 1 else ""
    yield f"on {tp * pp} x {hardware.device} of {hardware.device_bytes / GIB:.1f} GiB{split}"


def _memory(plan: Plan) -> Iterator[str]:
    used = plan.weight_bytes + plan.activation_bytes + plan.rows_bytes
    yield "One device, the fullest"
    yield _line(f"may be used ({plan.gpu_memory_utilization:g} of it)", _gib(plan.requested_bytes))
    yield _line("weights", _gib(plan.weight_bytes))
    yield _line(
        f"activations of {plan.max_num_batched_tokens:,} tokens, {plan.max_num_seqs:,} rows",
        _gib(plan.activation_bytes),
    )
    yield _line("tokens and block tables", _gib(plan.rows_bytes))
    yield _line("left", _gib(max(plan.requested_bytes - used, 0)))
    yield _line("KV cache (the size of one of its arrays stays free)", _gib(plan.kv_cache_bytes))


def _cache(plan: Plan) -> Iterator[str]:
    yield f"KV cache in {plan.kv_cache_dtype}"
    yield _line("bytes per token", f"{plan.kv_bytes_per_token:,}")
    per_device = max(stage.block_bytes for stage in plan.stages) // plan.block_size
    if per_device != plan.kv_bytes_per_token:
        yield _line("on one device", f"{per_device:,}")
    yield _line(f"blocks of {plan.block_size} tokens", f"{plan.num_blocks:,}")
    yield _line("tokens", f"{plan.kv_cache_tokens:,}")
    yield _line(
        f"most blocks of a request of {plan.max_model_len:,} tokens",
        f"{plan.max_blocks_per_request:,}",
    )
    yield _line("such requests at once (maximum concurrency)", f"{plan.max_concurrency:.2f}x")


def _end(plan: Plan, advice: Sequence[str]) -> Iterator[str]:
    yield from (f"Note: {note}." for note in plan.notes)
    if plan.fits:
        yield "It fits."
        return
    yield (
        f"It does not fit: a device lacks {plan.missing_bytes / GIB:.2f} GiB for one request of "
        f"{plan.max_model_len:,} tokens."
    )
    yield from (f"  This alone makes room: {change}" for change in advice)
    if not advice:
        yield "  No one change makes room; use a smaller model, or combine several."


def _line(text: str, value: str) -> str:
    return f"  {text:<52}{value:>16}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
