"""Memory of a workload: how much of the KV cache is wasted, and how much sharing saves."""

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged import LLM, BeamSearchParams
from jpaged.bench.report import setting
from jpaged.bench.workload import WorkItem
from jpaged.engine.usage import UsageMeter


def measure(
    model: str,
    workload: Sequence[WorkItem],
    *,
    beam_width: int | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Runs a workload once, from an empty cache. beam_width: search for its prompts instead.

    Returns figures that JSON can hold. `waste` and `sharing` are averages over the forward passes,
    see `UsageMeter`; counts are of the whole run, in tokens and blocks.
    """
    prompts = [item.prompt_ids for item in workload]
    with LLM(model, skip_tokenizer_init=True, **options) as llm:
        meter = llm.engine.meter = UsageMeter()
        if beam_width is None:
            llm.generate(prompts, [item.params for item in workload], use_tqdm=False)
        else:
            _search(llm, workload, beam_width)
        end, stats = llm.snapshot(), llm.stats
        return {
            "waste": round(meter.waste, 4),
            "sharing": round(meter.sharing, 4),
            "num_forward_passes": meter.num_passes,
            "peak_held_blocks": meter.peak_held,
            "num_prompt_tokens": sum(map(len, prompts)),
            "num_prefill_tokens": stats.num_prefill_tokens,
            "num_cache_queries": stats.num_cache_queries,
            "num_cache_hits": stats.num_cache_hits,
            "num_preemptions": stats.num_preemptions,
            "num_held_blocks_at_end": end.cache.num_held,
            "num_requests": len(workload),
            "num_sequences": sum(beam_width or item.params.n for item in workload),
            "beam_width": beam_width,
            **setting(llm, model),
        }


def _search(llm: LLM, workload: Sequence[WorkItem], beam_width: int) -> None:
    """Beam searches, side by side where max_tokens are equal."""
    by_length: dict[int, list[WorkItem]] = {}
    for item in workload:
        by_length.setdefault(item.params.max_tokens or 1, []).append(item)
    for max_tokens, items in by_length.items():
        params = BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens, ignore_eos=True)
        llm.beam_search([item.prompt_ids for item in items], params)
