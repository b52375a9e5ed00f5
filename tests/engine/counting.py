"""An engine over the counting model: every token of every request is known in advance."""

import dataclasses

import jax.numpy as jnp

from jpaged.config import EngineConfig, ModelConfig
from jpaged.core.state import init_state
from jpaged.engine.capacity import blocks_per_request
from jpaged.engine.defaults import Defaults
from jpaged.engine.engine import Engine
from jpaged.engine.intake import Intake
from jpaged.engine.llm import LLM
from jpaged.engine.reporter import Reporter
from jpaged.engine.rules import rule_sizes
from jpaged.sampling_params import SamplingParams
from tests.core.scripted import (
    VOCAB_SIZE,
    counting_forward,
    counting_kv,
    counting_params,
    greedy_continuation,
)

MODEL = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
)


def make_counting_engine(
    num_blocks: int = 64,
    *,
    eos_ids: list[int] | None = None,
    max_position: int = MODEL.max_position,
    tokenizer=None,
    **options,
) -> tuple[Engine, Intake]:
    """Engine and intake with block size 4, 6 rows and 64 tokens a request unless told otherwise."""
    model = dataclasses.replace(MODEL, max_position=max_position)
    defaults = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 16, "warm_up": "off"}
    config = EngineConfig.from_options(**(defaults | options)).resolved(model, "cpu")

    def make_state():
        return init_state(
            counting_kv(num_blocks, config.cache.block_size),
            num_rows=config.max_num_seqs,
            max_blocks_per_row=blocks_per_request(config),
            hash_key=jnp.arange(4, dtype=jnp.uint32),
            num_stop_ids=config.max_stop_ids,
            rule_sizes=rule_sizes(config, VOCAB_SIZE),
            processors=tuple(config.logits_processors),
        )

    engine = Engine(counting_forward, counting_params(), config, make_state, VOCAB_SIZE)
    return engine, Intake(model, config, num_blocks, tokenizer, Defaults(eos_ids or []))


class CountingLLM(LLM):
    """An LLM over the counting model. Takes what `make_counting_engine` takes."""

    def __init__(self, *args, tokenizer=None, **options):
        self._engine, self._intake = make_counting_engine(*args, tokenizer=tokenizer, **options)
        self._tokenizer, self._reporter = tokenizer, Reporter(tokenizer)

    def update_params(self, params):
        self._engine.update_params(params)


def greedy(max_tokens: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


def run(engine: Engine, requests: list) -> None:
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        engine.step()


def expected(prompt: list[int], max_tokens: int, shift: int = 0) -> list[int]:
    return greedy_continuation(prompt, max_tokens, shift)
