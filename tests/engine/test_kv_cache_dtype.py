"""Engines whose keys and values have 8 bits: what a model says that rounds them, and told."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged import functional as F
from jpaged.config import EngineConfig, ModelConfig
from jpaged.engine import capacity, implementation
from jpaged.errors import ConfigError
from jpaged.models.attend import dense_attend
from jpaged.models.forward import bind
from jpaged.models.prepare import prepare
from jpaged.native import attention as native
from jpaged.ops.heads import Heads
from tests.engine.test_llm import PROMPTS, tiny_params
from tests.models.test_model_config import LLAMA
from tests.native.kernels import load_or_skip

CONFIG = ModelConfig.from_hf(LLAMA)
OPTIONS: dict[str, Any] = {
    "max_model_len": 32,
    "block_size": 8,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "num_decode_steps": 2,
    "skip_tokenizer_init": True,
    "dtype": "float32",
}
SCORED = SamplingParams(temperature=0.0, max_tokens=4, logprobs=0)
Rounding = Callable[[jax.Array], jax.Array]


def in_steps(x: jax.Array) -> jax.Array:
    step = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    return jnp.round(x / step) * step


def as_type(dtype: str) -> Rounding:
    return lambda x: x.astype(dtype).astype(x.dtype)


def relative_to_peak(x: jax.Array) -> jax.Array:
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 448
    return as_type("float8_e4m3fn")(x / scale) * scale


# What each does to a head's keys and values, and the largest change of a log-probability, in nats,
# of a model whose scores are eight times as sharp as those of a trained one.
FORMATS: dict[str, tuple[Rounding, float]] = {
    "int8": (in_steps, 0.03),
    "fp8": (as_type("float8_e4m3fn"), 0.3),
    "fp8_e5m2": (as_type("float8_e5m2"), 0.4),
    "fp8_per_token_head": (relative_to_peak, 0.1),
    "bfloat16": (as_type("bfloat16"), 0.02),
}
DEFAULT = ("fp8_per_token_head",)  # the others compile as many programs, and differ in little


def dense_numbers(samples: list[list[int]], num_prompt: list[int], rounding: Rounding):
    """Log-probabilities of the tokens after each prompt, by the model without a cache."""

    def attend(heads, kv=None, **rule):
        q, k, v = heads.turned()
        packed = jnp.concatenate([q, rounding(k), rounding(v)], axis=1)
        return dense_attend(Heads(packed, heads.num_kv_heads), kv, **rule)

    @jax.jit
    def forward(params, token_ids):
        model = bind(CONFIG, params, fused=True)
        positions = jnp.arange(len(token_ids))
        lengths = jnp.full_like(positions, len(token_ids))
        hidden, _ = model.model(token_ids, positions, lengths, (None,) * CONFIG.num_layers, attend)
        return jax.nn.log_softmax(model.logits(hidden))

    params, found = prepare(tiny_params(CONFIG, 0), CONFIG, "float32"), []
    for tokens, start in zip(samples, num_prompt, strict=True):
        padded = np.pad(np.array(tokens, np.int32), (0, 32 - len(tokens)))
        logprobs = np.asarray(forward(params, padded))
        found += [logprobs[i - 1, tokens[i]] for i in range(start, len(tokens))]
    return np.array(found)


def answers(llm: LLM) -> tuple[list[list[int]], np.ndarray]:
    """Each prompt with its answer, and the log-probabilities of all answers' tokens."""
    samples, numbers = [], []
    for output in llm.generate(PROMPTS, SCORED, use_tqdm=False):
        (one,) = output.outputs
        samples.append(output.prompt_token_ids + one.token_ids)
        assert one.logprobs is not None
        numbers += [of[i].logprob for of, i in zip(one.logprobs, one.token_ids, strict=True)]
    return samples, np.array(numbers)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in DEFAULT else pytest.mark.slow) for n in FORMATS]
)
def test_numbers_are_those_of_a_model_that_rounds(name, caplog):
    caplog.set_level("INFO", logger="jpaged")
    asked: dict[str, Any] = {"kv_cache_dtype": name, "implementation": "xla", **OPTIONS}
    with LLM(CONFIG, params=tiny_params(CONFIG, 0), **asked) as llm:
        samples, found = answers(llm)
        told = llm.snapshot().kv_cache_dtype
        assert llm.dtype == "float32"
    assert told == {"int8": "int8_per_token_head", "fp8": "fp8_e4m3"}.get(name, name)
    assert f"tokens in {told}" in caplog.text
    rounding, bound = FORMATS[name]
    num_prompt = [len(prompt) for prompt in PROMPTS]
    rounded = dense_numbers(samples, num_prompt, rounding)
    exact = dense_numbers(samples, num_prompt, lambda x: x)
    change = np.abs(rounded - exact).max()
    assert 0 < change < bound
    # A number at the edge of two steps may fall to either side.
    assert np.abs(found - rounded).max() < change / 64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_deterministic_numbers_are_the_same_in_any_company(name):
    asked: dict[str, Any] = {"kv_cache_dtype": name, "implementation": "xla", **OPTIONS}
    with LLM(CONFIG, params=tiny_params(CONFIG, 0), deterministic=True, **asked) as llm:
        together = llm.generate(PROMPTS, SCORED, use_tqdm=False)
        llm.reset_prefix_cache()
        alone = [llm.generate([p], SCORED, use_tqdm=False)[0] for p in PROMPTS]
    for some, other in zip(together, alone, strict=True):
        assert some.outputs[0].logprobs == other.outputs[0].logprobs


def test_with_native_products_attention_is_xlas_and_one_line_says_so(caplog):
    load_or_skip()
    caplog.set_level("INFO", logger="jpaged")
    config = EngineConfig.from_options(kv_cache_dtype="int8")
    assert implementation.resolve(config, device=jax.devices()[0]).implementation == "native"
    assert caplog.text.count("the native one reads no KV of 8 bits") == 1


@pytest.mark.parametrize("name", [*FORMATS, "auto"])
@pytest.mark.parametrize("chosen", ["xla", "native", "pallas"])
def test_the_attention_that_runs_is_told(name, chosen):
    """In the log and in the engine's stats, whatever products are."""
    config = EngineConfig.from_options(kv_cache_dtype=name, implementation=chosen)
    is_left_to_xla = chosen == "native" and name not in ("auto", "bfloat16")
    wanted = "xla" if is_left_to_xla else chosen
    assert config.attention_implementation == wanted
    said = implementation.describe(config, jax.devices()[0]).removesuffix(", interpreted")
    assert said == (f"{chosen}, of attention {wanted}" if is_left_to_xla else chosen)


def test_an_engine_tells_which_attention_it_runs(monkeypatch, caplog):
    """What its programs ask for, beside what it says that they do."""
    load_or_skip()
    caplog.set_level("INFO", logger="jpaged")
    asked = []
    monkeypatch.setattr(native, "attend", lambda q, *_, **options: asked.append(options) or q)
    for name in ("fp8", "auto"):
        with LLM(CONFIG, params=tiny_params(CONFIG, 0), kv_cache_dtype=name, **OPTIONS) as llm:
            llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1), use_tqdm=False)
            told = llm.snapshot()
        assert told.implementation == "native"
        assert told.attention_implementation == ("native" if asked else "xla")
        assert bool(asked) == (name == "auto")
    assert "kernels are native, of attention xla" in caplog.text


def test_native_attention_that_is_asked_for_is_refused():
    asked = EngineConfig.from_options(implementation="native", kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match=r"no attention over KV of 8 bits .*'fp8'.* choose auto"):
        asked.resolved(CONFIG, "cpu")


def test_unknown_names_are_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp4' is unknown; choose auto or fp8"):
        EngineConfig.from_options(kv_cache_dtype="fp4")
    with pytest.raises(ConfigError, match="kv_cache_dtype='float64' is unknown"):
        F.init_state(CONFIG, num_rows=1, max_model_len=8, key=F.seed_key(0), dtype="float64")


@pytest.mark.parametrize(
    ("name", "per_head"),
    [("auto", 2 * 16), ("float32", 4 * 16), ("fp8", 16), ("int8_per_token_head", 16 + 4)],
)
def test_the_pool_counts_numbers_and_scales(name, per_head):
    """A model that runs in bfloat16, with heads of 16 numbers."""
    config = EngineConfig.from_options(kv_cache_dtype=name, block_size=8)
    one_token = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * per_head
    assert CONFIG.head_dim == 16
    assert capacity.block_bytes(config, CONFIG, "bfloat16") == 8 * one_token
