"""Log-probabilities equal the log-softmax of Hugging Face's logits, however they come about."""

import functools as ft

import numpy as np
import pytest
import torch

from jpaged import LLM, SamplingParams
from jpaged.config import ModelConfig
from tests.models.hf_models import CASES, hf_config_dict, hf_params, make_hf_model

TOLERANCE = 1e-4
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 56,
    "block_size": 4,
    "max_num_batched_tokens": 8,  # prompts are read in chunks
    "num_gpu_blocks_override": 20,  # and sequences preempted
    "num_decode_steps": 3,
    "max_num_seqs": 4,
}


@ft.cache
def hf_case():
    hf_model = make_hf_model(CASES["llama"])
    config = ModelConfig.from_hf(hf_config_dict(hf_model))
    return hf_model, config, hf_params(hf_model, config)


def hf_logprobs(tokens: list[int]) -> np.ndarray:
    """Float32[T V]: of what follows each token."""
    with torch.no_grad():
        logits = hf_case()[0](torch.tensor([tokens]), use_cache=False).logits[0]
    return torch.log_softmax(logits, dim=-1).numpy()


def check(entries, tokens: list[int], start: int, k: int) -> None:
    """Entries tell of the tokens from `start` on."""
    want = hf_logprobs(tokens)[start - 1 :]
    assert len(entries) == len(tokens) - start
    for entry, token, row in zip(entries, tokens[start:], want, strict=False):
        ids = list(entry)
        got = np.array([entry[i].logprob for i in ids])
        np.testing.assert_allclose(got, row[ids], atol=TOLERANCE, rtol=0)
        # Ids closer than rounding may change places.
        near = np.sum(row > row[token] + TOLERANCE), np.sum(row > row[token] - TOLERANCE)
        assert near[0] < entry[token].rank <= max(near[1], 1)
        assert sorted(got, reverse=True)[:k] == pytest.approx(np.sort(row)[::-1][:k], abs=TOLERANCE)


def test_log_probabilities_equal_hugging_faces():
    _, config, params = hf_case()
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, config.vocab_size, n).tolist() for n in (3, 9, 13, 20, 30)]
    asked = SamplingParams(
        n=2, seed=1, max_tokens=20, ignore_eos=True, logprobs=5, prompt_logprobs=4
    )
    with LLM(model=config, params=params, **OPTIONS) as llm:
        for _ in ("cold", "warm"):
            for output in llm.generate(prompts, asked, use_tqdm=False):
                prompt = output.prompt_token_ids
                assert output.prompt_logprobs is not None
                check(output.prompt_logprobs[1:], prompt, 1, 4)
                for one in output.outputs:
                    check(one.logprobs, prompt + one.token_ids, len(prompt), 5)
        assert llm.stats.num_preemptions > 0
        plain = SamplingParams(n=2, seed=1, max_tokens=20, ignore_eos=True, logprobs=5)
        for _ in ("cold", "warm"):
            (output,) = llm.generate(prompts[-1:], plain, use_tqdm=False)
            for one in output.outputs:
                check(one.logprobs, prompts[-1] + one.token_ids, len(prompts[-1]), 5)
        assert output.num_cached_tokens


def test_scores_of_given_tokens_equal_hugging_faces():
    _, config, params = hf_case()
    rng = np.random.default_rng(6)
    shared = rng.integers(0, config.vocab_size, 14).tolist()
    prompts = [shared, [5], shared, shared[:7]]
    given = [rng.integers(0, config.vocab_size, n).tolist() for n in (1, 30, 12, 40)]
    with LLM(model=config, params=params, **OPTIONS) as llm:
        for _ in ("cold", "warm"):
            found = llm.score_tokens(prompts, given, use_tqdm=False)
            for prompt, tokens, scored in zip(prompts, given, found, strict=True):
                assert scored.token_ids == tokens
                rows = hf_logprobs(prompt + tokens)[len(prompt) - 1 : -1]
                want = rows[np.arange(len(tokens)), tokens]
                np.testing.assert_allclose(scored.logprobs, want, atol=TOLERANCE, rtol=0)
        assert llm.stats.num_cache_hits > 0
