"""Engines with matrices of 8 and 4 bits: near what the numbers stand for, to the bit, and told."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged import functional as F
from jpaged.config import EngineConfig, ModelConfig
from jpaged.engine import compiled, weights
from jpaged.errors import ConfigError
from jpaged.loading import load_hf_config, load_params
from jpaged.models.forward import dense_forward
from jpaged.models.prepare import param_bytes, prepare
from jpaged.ops.grouped import dequantize
from tests.engine.test_llm import PROMPTS, tiny_params
from tests.loading.checkpoints import (
    FIXTURES,
    TINY,
    close_writer,
    gguf_writer,
    tiny_tensors,
    write_hf,
)
from tests.models.test_model_config import LLAMA
from tests.native.kernels import load_or_skip

CONFIG = ModelConfig.from_hf(LLAMA)
GGUF = FIXTURES / "formats" / "gguf_q4_1"
OPTIONS: dict[str, Any] = {
    "max_model_len": 64,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_decode_steps": 4,
    "skip_tokenizer_init": True,
    "dtype": "float32",
}
SCORED = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0, logprobs=0)
Numbers = list[list[float]]


def numbers_of(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS) -> Numbers:
    """Log-probabilities of each prompt's tokens, and of eight more that are drawn."""
    found = []
    for output in llm.generate([list(prompt) for prompt in prompts], SCORED, use_tqdm=False):
        (sample,) = output.outputs
        assert output.prompt_logprobs is not None
        assert sample.logprobs is not None
        entries = [*output.prompt_logprobs[1:], *sample.logprobs]
        tokens = [*output.prompt_token_ids[1:], *sample.token_ids]
        pairs = zip(entries, tokens, strict=True)
        found.append([of[token].logprob for of, token in pairs if of is not None])
    return found


def dense_numbers(config: ModelConfig, serving: Any) -> Numbers:
    """Of the prompts' tokens, by the model without a cache."""
    forward, found = jax.jit(dense_forward(config, fused=True)), []
    for prompt in PROMPTS:
        tokens = jnp.asarray(prompt + [0] * (17 - len(prompt)), jnp.int32)  # one program for all
        logprobs = np.asarray(jax.nn.log_softmax(forward(serving, tokens)))
        found.append([float(logprobs[i, token]) for i, token in enumerate(prompt[1:])])
    return found


def distance(some: Numbers, others: Numbers) -> float:
    """The largest difference in the prompts' log-probabilities; tokens drawn may part ways."""
    lengths = [len(prompt) - 1 for prompt in PROMPTS]
    flat = [
        np.concatenate([x[:n] for x, n in zip(rows, lengths, strict=True)])
        for rows in (some, others)
    ]
    return float(np.abs(flat[0] - flat[1]).max())


def xla_numbers(params, bits: str | None) -> Numbers:
    return dense_numbers(CONFIG, prepare(params, CONFIG, "float32", quantization=bits))


@pytest.fixture(scope="module")
def native():
    """An engine with int8 matrices in C++, deterministic; its weights are changed at the end."""
    load_or_skip()
    params = tiny_params(CONFIG, 0)
    asked: dict[str, Any] = {"implementation": "native", "quantization": "int8"}
    with LLM(CONFIG, params=params, deterministic=True, **(OPTIONS | asked)) as llm:
        yield llm


def test_native_products_are_as_near_as_their_rows_are_fine(native):
    """Rows have 128 times as many steps as weights: 16 times nearer than the weights' own error."""
    params = tiny_params(CONFIG, 0)
    exact = xla_numbers(params, "int8")
    error = distance(exact, xla_numbers(params, None))
    assert 0 < distance(numbers_of(native), exact) < error / 16


def test_native_bits_are_the_same_in_any_company(native):
    together = numbers_of(native)
    alone = [numbers_of(native, [prompt])[0] for prompt in PROMPTS]
    assert together == alone


def test_the_engine_tells_what_its_weights_take(native):
    told = native.snapshot()
    assert told.quantization == "int8"
    assert told.weight_bytes == param_bytes(native.engine._device.params)
    matrices = 4 * (64 * 128 + 64 * 64 + 64 * 256 + 128 * 64) + 64 * 128  # 100 ids fill 4 panels
    floats = 4 * (100 * 64 + 9 * 64)
    assert told.weight_bytes == matrices * 34 // 32 + floats


def test_new_weights_are_quantized_and_nothing_is_compiled(native):
    changed = tiny_params(CONFIG, 1)
    numbers_of(native)  # compiles what there is to compile
    before = compiled.compile_clock.num_programs
    native.update_params(changed)
    found = numbers_of(native)
    assert compiled.compile_clock.num_programs == before
    exact = xla_numbers(changed, "int8")
    assert distance(found, exact) < distance(exact, xla_numbers(changed, None)) / 16


def test_xla_bits_are_the_same_in_any_company(caplog):
    caplog.set_level("INFO", logger="jpaged")
    params = tiny_params(CONFIG, 0)
    asked: dict[str, Any] = {
        "implementation": "xla",
        "quantization": "int4",
        "dtype": "bfloat16",
    }
    with LLM(CONFIG, params=params, deterministic=True, **(OPTIONS | asked)) as llm:
        assert numbers_of(llm) == [numbers_of(llm, [prompt])[0] for prompt in PROMPTS]
        told = llm.snapshot()
    matrices, head = 4 * (64 * 128 + 64 * 64 + 64 * 256 + 128 * 64), 64 * 100
    table_and_norms = 100 * 64 + 9 * 64
    assert told.weight_bytes == matrices * 20 // 32 + head * 34 // 32 + 2 * table_and_norms
    assert f"weights are {told.weight_bytes} bytes in bfloat16 and int4 numbers" in caplog.text


def test_functions_serve_quantized_weights_too():
    params, keys = tiny_params(CONFIG, 0), np.stack([F.seed_key(0)])
    prompts, lens = np.array([PROMPTS[0]]), np.array([len(PROMPTS[0])])
    options = {"config": CONFIG, "max_new_tokens": 1, "dtype": "float32"}
    run = jax.jit(lambda p: F.generate(p, prompts, lens, keys, quantization="int4", **options))
    got = run(params)
    forward, told = jax.jit(dense_forward(CONFIG, fused=True)), []
    for bits in ("int4", None):
        logits = forward(prepare(params, CONFIG, "float32", quantization=bits), prompts[0])
        told.append(jax.nn.log_softmax(logits[-1])[got.token_ids[0, 0]])
    assert abs(got.logprobs[0, 0] - told[0]) < 1e-5 < 1e-3 < abs(told[0] - told[1])


# --- GGUF's own numbers ---


def served(path: Path, **options: Any) -> tuple[ModelConfig, Any]:
    config = ModelConfig.from_hf(load_hf_config(path))
    asked: dict[str, Any] = {"implementation": "xla", **options}
    engine = EngineConfig(**asked).resolved(config, "cpu")
    return config, weights.load(path, config, engine, "float32")


def test_a_files_numbers_are_served_as_they_are():
    """Exactly what its weights are once dequantized, fused and transposed."""
    config, serving = served(GGUF, quantization="gguf")
    floats = prepare(load_params(GGUF, config, "float32"), config, "float32")
    for i, layer in floats["model"]["layers"].items():
        for block, name in (
            *(("self_attn", name) for name in ("qkv_proj", "o_proj")),
            *(("mlp", name) for name in ("gate_up_proj", "down_proj")),
        ):
            weight = serving["model"]["layers"][i][block][name]["weight"]
            assert weight.leasts is not None
            wanted = layer[block][name]["weight"]
            np.testing.assert_array_equal(dequantize(weight, jnp.float32), wanted)
    head = serving["lm_head"]["weight"]
    np.testing.assert_array_equal(dequantize(head, jnp.float32), floats["lm_head"]["weight"])
    table = serving["model"]["embed_tokens"]["weight"]
    np.testing.assert_array_equal(table, floats["model"]["embed_tokens"]["weight"])


def test_an_engine_says_with_a_files_numbers_what_their_floats_say():
    """The same weights: what is between them is the rounding of rows, in C++ at most 2^-15."""
    load_or_skip()
    config = ModelConfig.from_hf(load_hf_config(GGUF))
    floats = prepare(load_params(GGUF, config, "float32"), config, "float32")
    wanted = dense_numbers(config, floats)
    asked: dict[str, Any] = {"implementation": "native", "quantization": "gguf"}
    with LLM(GGUF, **(OPTIONS | asked)) as llm:
        assert distance(numbers_of(llm), wanted) < 1e-3
        with pytest.raises(ConfigError, match=r"gguf.*params have none; choose int8 or int4"):
            llm.update_params(load_params(GGUF, config, "float32"))
    eight_bits = prepare(
        load_params(GGUF, config, "float32"), config, "float32", quantization="int8"
    )
    assert distance(dense_numbers(config, eight_bits), wanted) > 1e-3, "no test of what is kept"


def write_mixed(path: Path) -> Path:
    """A tied model, its matrices in many types."""
    kinds = {"attn_q": "Q4_1", "attn_k": "Q8_0", "attn_v": "Q4_1", "attn_output": "Q8_0"}
    kinds |= {"ffn_gate": "Q4_0", "ffn_up": "Q4_1", "ffn_down": "F16", "token_embd": "Q4_0"}
    names = {
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    writer = gguf_writer(path / "model.gguf")
    for name, tensor in tiny_tensors(TINY | {"tie_word_embeddings": True}).items():
        parts = name.split(".")
        own = names.get(parts[-2])
        stem = (
            f"blk.{parts[2]}.{own}" if own else {"norm": "output_norm"}.get(parts[1], "token_embd")
        )
        quant = gguf.GGMLQuantizationType[kinds.get(own or stem, "F32")]
        packed = gguf.quants.quantize(tensor, quant)
        writer.add_tensor(f"{stem}.weight", packed, raw_dtype=quant)
    close_writer(writer)
    return path


def test_matrices_that_can_not_be_kept_become_int8(tmp_path: Path):
    config, serving = served(write_mixed(tmp_path), quantization="gguf")
    layer = serving["model"]["layers"][1]
    has_leasts = {
        name: layer[block][name]["weight"].leasts is not None
        for block in ("self_attn", "mlp")
        for name in layer[block]
    }
    # q and v have leasts, k has not; the file's gate and up are of two types, but of one kind.
    assert has_leasts == {
        "qkv_proj": False,
        "o_proj": False,
        "gate_up_proj": True,
        "down_proj": False,
    }
    floats = prepare(load_params(tmp_path, config, "float32"), config, "float32")
    for block, name in (("mlp", "gate_up_proj"), ("self_attn", "o_proj")):
        wanted = floats["model"]["layers"][1][block][name]["weight"]
        got = dequantize(layer[block][name]["weight"], jnp.float32)
        np.testing.assert_array_equal(got, wanted)
    head = dequantize(serving["lm_head"]["weight"], jnp.float32)
    np.testing.assert_array_equal(head, floats["lm_head"]["weight"])
    np.testing.assert_array_equal(serving["model"]["embed_tokens"]["weight"], head[:32].T)


def test_a_float32_head_of_a_tied_file_is_dequantized(tmp_path: Path):
    config, serving = served(write_mixed(tmp_path), quantization="gguf", head_dtype="float32")
    floats = prepare(load_params(tmp_path, config, "float32"), config, "float32")
    np.testing.assert_array_equal(serving["lm_head"]["weight"], floats["lm_head"]["weight"])


# --- loading ---


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_load_holds_a_layer_at_a_time(tmp_path: Path, monkeypatch, quantization):
    path = write_hf(tmp_path, TINY, tiny_tensors(TINY))
    held = []

    def prepare_layer(layer, form):
        held.append(sum(x.nbytes for x in jax.live_arrays()) - before)
        return original(layer, form=form)

    original = compiled.prepare_layer
    monkeypatch.setattr(compiled, "prepare_layer", prepare_layer)
    before = sum(x.nbytes for x in jax.live_arrays())
    _, serving = served(path, quantization=quantization)
    ends = param_bytes({**serving, "model": {**serving["model"], "layers": {}}})
    layer = param_bytes(serving["model"]["layers"][0])
    one = 4 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64 + 2 * 32)  # a layer in float32, as read
    assert held == [ends + one, ends + layer + one]


# --- refusals ---


def test_unknown_names_are_told_the_choices():
    with pytest.raises(ConfigError, match="'fp8' is unknown; choose int8 or int4 or gguf"):
        LLM("nowhere", quantization="fp8")


def test_what_is_no_gguf_file_has_no_numbers_to_serve(tmp_path: Path):
    with pytest.raises(ConfigError, match=r'"gguf" serves the numbers of a GGUF file, which'):
        LLM(CONFIG, params=tiny_params(CONFIG, 0), quantization="gguf")
    path = write_hf(tmp_path, TINY, tiny_tensors(TINY))
    with pytest.raises(ConfigError, match="choose int8 or int4"):
        LLM(path, quantization="gguf", **OPTIONS)
