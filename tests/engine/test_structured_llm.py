"""Structured outputs of a model with random weights: all valid, whatever the model thinks."""

import json

import jax
import pytest

from jpaged import LLM, SamplingParams, StructuredOutputsParams
from jpaged.config import ModelConfig
from jpaged.models.forward import init_params
from tests.engine.tiny_tokenizers import all_bytes_and_pieces
from tests.models.test_model_config import LLAMA

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm():
    tokenizer = all_bytes_and_pieces()
    config = ModelConfig.from_hf(LLAMA | {"vocab_size": 320})  # more ids than the tokenizer has
    params = init_params(config, jax.random.key(0), "float32")
    options = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    with LLM(model=config, params=params, tokenizer=tokenizer, **options) as llm:
        yield llm


def is_valid(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "tags", "ok"]
        and isinstance(found["name"], str)
        and len(found["name"]) <= 8
        and type(found["age"]) is int
        and 0 <= found["age"] <= 150
        and len(found["tags"]) <= 3
        and set(found["tags"]) <= {"red", "green"}
        and type(found["ok"]) is bool
    )


def test_a_schema_holds_in_a_hundred_of_a_hundred_outputs(llm):
    spec = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    params = [
        SamplingParams(seed=seed, temperature=1.5, max_tokens=240, structured_outputs=spec)
        for seed in range(100)
    ]
    free = SamplingParams(temperature=0.0, max_tokens=30)
    prompts = [[3 + seed % 90, 5] for seed in range(100)]
    outputs = llm.generate([*prompts, [4, 5, 6]], [*params, free], use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs[:100]]
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs[:100])
    assert all(map(is_valid, texts))
    assert len(set(texts)) > 90
    assert len(outputs[100].outputs[0].token_ids) == 30
