"""Which implementation of attention an engine runs, and that none changes what it says."""

import pytest

from jpaged import LLM
from jpaged.config import ModelConfig
from tests.engine.test_llm import GREEDY, PROMPTS, tiny_params, tokens_of
from tests.models.test_model_config import LLAMA

OPTIONS = {
    "max_model_len": 64,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_decode_steps": 4,
}


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_hf(LLAMA)


def run(config, **options):
    with LLM(model=config, params=tiny_params(config, 0), **(OPTIONS | options)) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        return tokens_of(outputs), llm.snapshot().implementation


def test_native_tokens_are_xlas(config):
    wanted, name = run(config, implementation="xla")
    assert name == "xla"
    assert run(config, implementation="native") == (wanted, "native")
