"""Beam search equals Hugging Face's: sequences and scores, on tiny models of three families."""

import functools as ft
from collections import Counter

import jax
import numpy as np
import pytest
import torch

from jpaged import LLM, BeamSearchParams
from tests.engine.hf_tokens import hf_greedy
from tests.engine.test_hf_tokens import hf_case, make_prompts
from tests.models.hf_models import CASES, make_hf_model

FAMILIES = [
    "gemma3",
    pytest.param("llama_llama3", marks=pytest.mark.slow),
    pytest.param("qwen2", marks=pytest.mark.slow),
]
MAX_TOKENS = 12
SETTINGS = [(0.0, False), (1.0, False), (1.0, True), (2.0, "never")]


class OneEos:
    """As much of a tokenizer as beam search asks for."""

    def __init__(self, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id

    def decode(self, token_ids, **_) -> str:
        return " ".join(map(str, token_ids))


@ft.cache
def hf_model_and_eos(name: str):
    """The model, and a token that ends some of its likeliest sequences, and not all of them."""
    hf_model = make_hf_model(CASES[name])
    prompts = make_prompts(hf_model.config.vocab_size)

    def sequences(eos_id: int) -> list[list[int]]:
        return [row for p in prompts for row in hf_beams(hf_model, p, 6, 1.0, False, eos_id)[0]]

    drawn = Counter(token for row in sequences(-1) for token in set(row[-MAX_TOKENS + 3 :]))
    for eos_id, _ in drawn.most_common():
        ends = {row[-1] == eos_id for row in sequences(eos_id)}
        if len(ends) == 2:
            return hf_model, eos_id
    raise AssertionError("no token ends some sequences and not others")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    config, params, prompts, _ = hf_case(request.param)
    hf_model, eos_id = hf_model_and_eos(request.param)
    options = {"max_model_len": 40, "max_num_seqs": 12, "block_size": 4, "num_decode_steps": 4}
    with LLM(model=config, params=params, tokenizer=OneEos(eos_id), **options) as llm:
        yield hf_model, eos_id, llm, prompts
    jax.clear_caches()


def hf_beams(hf_model, prompt, width, length_penalty, early_stopping, eos_id):
    """Transformers' sequences, without what pads them, and their scores."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = hf_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=None if eos_id < 0 else eos_id,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    sequences = []
    for row in found.sequences[:, len(prompt) :].tolist():
        end = row.index(eos_id) + 1 if eos_id in row else MAX_TOKENS
        sequences.append(prompt + row[:end])
    return sequences, found.sequences_scores


@pytest.mark.parametrize("width", [4, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("length_penalty", "early_stopping"), SETTINGS)
def test_sequences_and_scores(family, width, length_penalty, early_stopping):
    hf_model, eos_id, llm, prompts = family
    params = BeamSearchParams(
        beam_width=width,
        max_tokens=MAX_TOKENS,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        sequences, scores = hf_beams(
            hf_model, prompt, width, length_penalty, early_stopping, eos_id
        )
        assert [one.tokens for one in output.sequences] == sequences
        np.testing.assert_allclose([one.score for one in output.sequences], scores, atol=1e-4)


def test_width_one_is_greedy(family):
    """Transformers searches greedily then, which ends at the first end of sequence."""
    hf_model, eos_id, llm, prompts = family
    params = BeamSearchParams(beam_width=1, max_tokens=MAX_TOKENS, early_stopping=True)
    wanted = hf_greedy(hf_model, prompts, MAX_TOKENS)
    for prompt, output, tokens in zip(
        prompts, llm.beam_search(prompts, params), wanted, strict=True
    ):
        end = tokens.index(eos_id) + 1 if eos_id in tokens else MAX_TOKENS
        (one,) = output.sequences
        assert one.tokens == prompt + tokens[:end]
        with torch.no_grad():
            logits = hf_model(torch.tensor([one.tokens])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[:end])[:, None])
        assert one.cum_logprob == pytest.approx(float(logprobs.sum()), abs=1e-4)
        assert one.score == pytest.approx(float(logprobs.sum()) / end, abs=1e-4)
