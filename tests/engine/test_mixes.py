"""Random mixes of requests on a real tiny model: each gets what it gets alone, to the bit."""

import random
from typing import Any

import numpy as np
import pytest

from jpaged import LLM, BeamSearchParams, SamplingParams
from jpaged.config import ModelConfig
from jpaged.core.state import check_invariants
from tests.engine.test_llm import PROMPTS, tiny_params
from tests.models.test_model_config import LLAMA

pytestmark = pytest.mark.optimized

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "deterministic": True,
    "max_model_len": 64,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "num_decode_steps": 3,
}
NUM_REQUESTS = 12


def draw_request(rng: random.Random) -> tuple[list[int], Any]:
    """A prompt, often with a beginning that others have too, and what is asked of it."""
    family, length = rng.randrange(3), rng.randint(1, 30)
    prompt = [(family * 13 + j * j) % 90 for j in range(length)]
    if rng.random() < 0.3:
        return prompt[:12], BeamSearchParams(
            beam_width=3, max_tokens=rng.randint(1, 8), early_stopping=rng.choice([None, "never"])
        )
    return prompt, SamplingParams(
        n=rng.randint(1, 3),
        temperature=1.0,
        seed=rng.randrange(2**40),
        max_tokens=rng.randint(1, 12),
        logprobs=0,
        skip_reading_prefix_cache=rng.choice([None, True]),
    )


def accept(llm: LLM, prompt: list[int], params: Any):
    is_search = isinstance(params, BeamSearchParams)
    take = llm._intake.accept_beams if is_search else llm._intake.accept
    (request,) = take([prompt], params)
    return request


def answer(llm: LLM, request) -> list[tuple]:
    """Tokens and log-probabilities, as they are."""
    if request.beam_params is None:
        return [(s.output_ids, s.scores.logprobs) for s in request.samples]
    return [(s.tokens, s.cum_logprob, s.score) for s in llm._reporter.beams_of(request).sequences]


def run_alone(llm: LLM, work: list[tuple[list[int], Any]]) -> list[list[tuple]]:
    answers = []
    for prompt, params in work:
        llm.reset_prefix_cache()
        request = accept(llm, prompt, params)
        llm.engine.add(request)
        while llm.engine.has_unfinished:
            llm.engine.step()
        answers.append(answer(llm, request))
    return answers


def run_mixed(llm: LLM, work: list[tuple[list[int], Any]], rng: random.Random) -> dict[int, list]:
    """All of them, arriving at any time, some of them aborted; the answers of the others."""
    requests, aborted = [], set()
    for place, (prompt, params) in enumerate(work):
        requests.append(accept(llm, prompt, params))
        llm.engine.add(requests[-1])
        for _ in range(rng.choice([0, 0, 1, 4])):
            llm.engine.step()
        if rng.random() < 0.2 and not requests[-1].is_finished:
            llm.engine.abort([requests[-1]])
            aborted.add(place)
    while llm.engine.has_unfinished:
        llm.engine.step()
    check_invariants(llm.engine._device.state)
    assert llm.engine.num_free_blocks == llm.engine.num_blocks - 1
    return {i: answer(llm, r) for i, r in enumerate(requests) if i not in aborted}


@pytest.mark.parametrize(
    ("num_blocks", "num_mixes"),
    [(20, 3), pytest.param(100, 20, marks=pytest.mark.slow)],
)
def test_each_request_gets_what_it_gets_alone(num_blocks: int, num_mixes: int):
    config = ModelConfig.from_hf(LLAMA)
    options = OPTIONS | {"num_gpu_blocks_override": num_blocks}
    with LLM(model=config, params=tiny_params(config, 0), **options) as llm:
        for seed in range(num_mixes):
            rng = random.Random(seed)
            work = [draw_request(rng) for _ in range(NUM_REQUESTS)]
            alone = run_alone(llm, work)
            mixed = run_mixed(llm, work, rng)
            assert len(mixed) > NUM_REQUESTS / 2
            for place, found in mixed.items():
                assert found == alone[place], (seed, place)
        assert (llm.stats.num_preemptions > 0) == (num_blocks == 20)


def deterministic_runs(dtype: str, *, deterministic: bool) -> list[tuple]:
    """Tokens and log-probabilities of one request: alone, in crowds, chunked, preempted."""
    config = ModelConfig.from_hf(LLAMA)
    wide = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 8}
    chunked = wide | {"max_num_batched_tokens": 16, "num_decode_steps": 1}
    preempted = chunked | {"num_gpu_blocks_override": 24}
    greedy = SamplingParams(temperature=0.0, max_tokens=20, logprobs=0)
    rng = np.random.default_rng(0)
    crowd = [rng.integers(0, 100, n).tolist() for n in rng.integers(1, 40, 11)]
    found = []
    for options, prompts in (
        (wide, [PROMPTS[1]]),
        (wide, [*crowd, PROMPTS[1]]),
        (wide, [PROMPTS[1], *crowd[::-1]]),
        (chunked, [*crowd[:4], PROMPTS[1], *crowd[4:]]),
        (preempted, [*crowd[:2], PROMPTS[1], *crowd[2:]]),
    ):
        with LLM(
            model=config,
            params=tiny_params(config, 0),
            dtype=dtype,
            deterministic=deterministic,
            **options,
        ) as llm:
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
            if options is preempted:
                assert llm.stats.num_preemptions > 0
        (mine,) = (o.outputs[0] for o in outputs if o.prompt_token_ids == PROMPTS[1])
        found.append((tuple(mine.token_ids), mine.cumulative_logprob))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_mode_gives_the_same_bits_in_any_company(dtype):
    found = deterministic_runs(dtype, deterministic=True)
    assert len(set(found)) == 1, found


@pytest.mark.slow
def test_without_the_mode_bits_do_differ():
    """The control: cumulative log-probabilities show what the mode takes away."""
    found = deterministic_runs("float32", deterministic=False)
    assert len(set(found)) > 1, found
