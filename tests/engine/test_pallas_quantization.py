"""A tiny model whose quantized matrices the kernels for GPUs multiply, interpreted on a CPU."""

from typing import Any

import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.config import ModelConfig
from jpaged.models.prepare import prepare
from jpaged.ops.kernel_linear import KernelWeight
from tests.engine.test_llm import PROMPTS, tiny_params
from tests.engine.test_quantization import dense_numbers
from tests.models.test_model_config import LLAMA

CONFIG = ModelConfig.from_hf(LLAMA | {"num_hidden_layers": 1})
# As few programs as there can be: kernels take long to compile for a CPU.
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "implementation": "pallas",
    "max_model_len": 32,
    "block_size": 8,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "num_decode_steps": 1,
}
SCORED = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)


@pytest.mark.parametrize("bits", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_an_engine_says_what_its_numbers_say(bits):
    """In float32 nothing is between them but the order of sums."""
    params = tiny_params(CONFIG, 0)
    wanted, floats = (
        np.array(dense_numbers(CONFIG, prepare(params, CONFIG, "float32", quantization=form))[0])
        for form in (bits, None)
    )
    with LLM(CONFIG, params=params, quantization=bits, **OPTIONS) as llm:
        layer = llm.engine._device.params["model"]["layers"][0]
        assert isinstance(layer["mlp"]["down_proj"]["weight"], KernelWeight)
        (output,) = llm.generate([PROMPTS[0]], SCORED, use_tqdm=False)
        told = llm.snapshot()
    assert (told.implementation, told.quantization) == ("pallas", bits)
    assert output.prompt_logprobs is not None
    pairs = zip(output.prompt_logprobs[1:], PROMPTS[0][1:], strict=True)
    got = np.array([entry[token].logprob for entry, token in pairs if entry is not None])
    assert np.abs(got - wanted).max() < 1e-4 < 1e-3 < np.abs(floats - wanted).max()
