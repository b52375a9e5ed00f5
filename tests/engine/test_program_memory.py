"""What the largest programs need, asked of the compiler, and a GPU made up to be filled by it."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig, ModelConfig
from jpaged.engine import capacity, compiled
from jpaged.engine.dispatch import pack_step, pad_rows
from jpaged.engine.program_memory import lower_largest, program_bytes
from jpaged.engine.rules import rule_sizes
from jpaged.models.forward import init_params, make_forward
from jpaged.models.prepare import param_bytes, prepare
from tests.engine.test_capacity import FakeGPU

pytestmark = pytest.mark.optimized

MODEL = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
        "torch_dtype": "float32",
    }
)
OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_decode_steps": 4, "block_size": 8}
CONFIG = EngineConfig.from_options(**OPTIONS).resolved(MODEL, "gpu")
NUM_BLOCKS = 24


@pytest.fixture(scope="module")
def params():
    return init_params(MODEL, jax.random.key(0), "float32")


def empty_state(config: EngineConfig = CONFIG):
    return compiled.empty_state(
        np.zeros(4, np.uint32),
        model=MODEL,
        dtype="float32",
        num_rows=config.max_num_seqs,
        num_blocks=NUM_BLOCKS,
        block_size=config.cache.block_size,
        max_blocks_per_row=capacity.blocks_per_request(config),
        rule_sizes=rule_sizes(config, MODEL.vocab_size),
        processors=(),
        is_cpu=True,
    )


def test_what_is_measured_is_what_the_engine_calls(params):
    forward, serving = make_forward(MODEL), prepare(params, MODEL, "float32")
    shapes = jax.eval_shape(empty_state)
    step, window = lower_largest(forward, serving, shapes, CONFIG)
    real_step = compiled.run_step.lower(
        serving,
        empty_state(),
        pack_step((), 4),
        forward=forward,
        num_tokens=32,
        num_decode_rows=0,
    )
    real_window = compiled.run_window.lower(
        serving, empty_state(), pad_rows((), 4), forward=forward, num_steps=4
    )
    # The persistent cache goes by these texts.
    assert step.as_text() == real_step.as_text()
    assert window.as_text() == real_window.as_text()


def test_the_bytes_hold_the_logits_and_grow_with_the_tokens(params):
    forward, shapes = make_forward(MODEL), jax.eval_shape(empty_state)
    few = program_bytes(forward, params_of(params), shapes, CONFIG)
    many = program_bytes(
        forward, params_of(params), shapes, replace(CONFIG, max_num_batched_tokens=512)
    )
    assert few is not None
    assert many is not None
    assert few > 4 * 8 * MODEL.vocab_size
    assert many - few > 4 * (512 - 32) * MODEL.hidden_size
    assert (
        many
        < capacity.estimated_activations(replace(CONFIG, max_num_batched_tokens=512), MODEL) + 2**20
    )


def params_of(params):
    return jax.eval_shape(lambda tree: prepare(tree, MODEL, "float32"), params)


@pytest.mark.slow
def test_a_gpu_is_filled_and_answers_as_a_cpu_does(params, monkeypatch, caplog):
    prompts = [[1, 5, 9, 3], list(range(20, 60)), [7] * 11]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)

    def answers(**options) -> tuple[LLM, list[list[int]]]:
        with LLM(MODEL, params=params, **(OPTIONS | options)) as llm:
            outputs = llm.generate(prompts, greedy, use_tqdm=False)
        return llm, [output.outputs[0].token_ids for output in outputs]

    _, expected = answers(max_model_len=64)
    weights = param_bytes(params_of(params))
    own = program_bytes(make_forward(MODEL), params_of(params), jax.eval_shape(empty_state), CONFIG)
    assert own is not None
    blocks = 14 * capacity.block_bytes(CONFIG, MODEL, "float32")
    limit = weights + own + capacity.rows_bytes(CONFIG) + blocks * 5 // 4  # four arrays, and a hole
    device = FakeGPU(limit, in_use=weights)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    caplog.set_level("INFO", logger="jpaged")
    llm, found = answers(max_model_len="auto", gpu_memory_utilization=0.9)
    assert found == expected
    assert "The largest program takes" in caplog.text
    longest = llm.engine.config.max_model_len
    assert longest in (12 * 8, 13 * 8)  # of 14 blocks or, for rounding, 13
    assert f"max_model_len auto: {longest} tokens" in caplog.text
    assert f"Maximum concurrency for {longest} tokens" in caplog.text
