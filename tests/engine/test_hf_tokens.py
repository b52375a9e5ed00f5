"""Greedy tokens equal Hugging Face's, family by family, however the engine cuts the work."""

import functools as ft
import json
from pathlib import Path

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.config import ModelConfig
from tests.engine.hf_tokens import hf_greedy
from tests.models.hf_models import CASES, hf_config_dict, hf_params, make_hf_model

MAX_TOKENS = 32
FAMILIES = ["llama_llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]
BY_DEFAULT = ("llama_llama3", "qwen3", "gemma3")
# Longest prompt and output fit 52 tokens. The small pool holds one such request and a little more,
# or half of it where every layer has a window of 7; such rows shrink, and need no preemption.
WINDOWED_POOL = 7
SETTINGS = {
    "small blocks, chunks, preemption": {
        "block_size": 4,
        "max_num_batched_tokens": 8,
        "num_gpu_blocks_override": 20,
        "num_decode_steps": 1,
        "max_num_seqs": 4,
    },
    "windows": {"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 64},
    "large blocks": {"block_size": 32, "max_num_seqs": 4, "max_num_batched_tokens": 64},
}


def make_prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, vocab_size, n).tolist() for n in (3, 9, 13, 20)]


@ft.cache
def hf_case(name: str):
    hf_model = make_hf_model(CASES[name])
    config = ModelConfig.from_hf(hf_config_dict(hf_model))
    prompts = make_prompts(config.vocab_size)
    return config, hf_params(hf_model, config), prompts, hf_greedy(hf_model, prompts, MAX_TOKENS)


def check(name: str, options: dict) -> None:
    config, params, prompts, wanted = hf_case(name)
    is_small, is_windowed = "num_gpu_blocks_override" in options, config.widest_window is not None
    if is_small and is_windowed:
        options = options | {"num_gpu_blocks_override": WINDOWED_POOL}
    assert len({tuple(tokens) for tokens in wanted}) > 1
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(model=config, params=params, max_model_len=56, **options) as llm:
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == wanted
        if is_small and not is_windowed:
            assert llm.stats.num_preemptions > 0


# The others' logits are compared by default, in tests/models; what the engine does is the same.
@pytest.mark.parametrize(
    "name",
    [
        name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_tokens_equal_whatever_the_engine_does_to_the_prompts(name: str):
    check(name, SETTINGS["small blocks, chunks, preemption"])


def test_tokens_equal_in_windows():
    check("gemma3", SETTINGS["windows"])


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", sorted(set(CASES) - {"llama_dynamic_beyond"}))  # 48 positions
def test_tokens_equal_in_the_wide_sweep(name: str, setting: str):
    check(name, SETTINGS[setting])


def check_fixture(folder: Path) -> None:
    reference = json.loads((folder / "reference.json").read_text())
    with LLM(
        str(folder), dtype="float32", skip_tokenizer_init=True, block_size=8, max_num_seqs=4
    ) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
        outputs = llm.generate(reference["prompts"], greedy, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == reference["greedy"]


@pytest.mark.parametrize("name", ["llama_llama3rope", "gemma3_text"])
def test_recorded_tokens_are_met_from_a_checkpoint(name: str):
    check_fixture(Path(__file__).parent.parent / "fixtures" / "arch" / name)


WIDE = [
    "llama_bfloat16",
    "llama_bias_tied",
    "llama_float16",
    "llama_linear_rope",
    "llama_sharded",
    "llama_yarn",
    "mistral_sw16",
    "qwen2",
    "qwen3",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_recorded_tokens_are_met_in_the_wide_sweep(name: str, shared_fixtures: Path):
    check_fixture(shared_fixtures / "fixtures" / "arch" / name)
