"""GGUF files: exact dequantized weights, names, row order, config, and damaged files."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from jpaged.errors import CheckpointError, UnsupportedModelError
from jpaged.loading import load_generation_config, load_hf_config, load_params, open_tensors
from jpaged.loading.stored import read_tensor
from jpaged.model_config import ModelConfig
from tests.loading.checkpoints import FIXTURES, by_name, close_writer, gguf_writer

FORMATS = FIXTURES / "formats"


def load(path: Path, dtype: str = "float32") -> dict[str, np.ndarray]:
    config = ModelConfig.from_hf(load_hf_config(path))
    return by_name(config, load_params(path, config, dtype))


def check_against_reference(folder: Path) -> None:
    reference = load_file(folder / "reference.safetensors")
    weights = {n.removeprefix("dequant."): t for n, t in reference.items() if "dequant.m" in n}
    assert weights, "the fixture records no weights"
    loaded = load(folder)
    for name, expected in weights.items():
        np.testing.assert_array_equal(loaded[name], expected, err_msg=name)


@pytest.mark.parametrize("name", ["gguf_q4_1", "gguf_q4_k_m"])
def test_dequantized_weights_are_exact(name: str):
    check_against_reference(FORMATS / name)


@pytest.mark.parametrize(
    "name",
    [
        "f16",
        "bf16",
        "q8_0",
        "q8_0_tied",
        "q4_0",
        "q5_0",
        "q2_k",
        "q4_k_pure",
        "q4_k_s",
        "q5_k_m",
        "q6_k",
    ],
)
def test_every_block_type_is_exact(shared_fixtures: Path, name: str):
    check_against_reference(shared_fixtures / "fixtures" / "formats" / f"gguf_{name}")


@pytest.mark.parametrize("kind", ["Q5_1", "Q8_0", "F16", "BF16"])
def test_rows_read_in_slices_equal_the_whole(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    values = np.random.default_rng(1).normal(size=(37, 64)).astype(np.float32)
    quant = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(values, quant)
    writer = gguf_writer(tmp_path / "model.gguf")
    writer.add_tensor("token_embd.weight", packed, raw_dtype=quant)
    close_writer(writer)
    tensor = open_tensors(tmp_path)["model.embed_tokens.weight"]
    monkeypatch.setattr("jpaged.loading.stored._SLICE", 5 * 64)
    whole = gguf.quants.dequantize(packed, quant)
    np.testing.assert_array_equal(read_tensor(tensor, "float32"), whole)


@pytest.mark.parametrize(
    "name",
    ["llama_bias_tied", "llama_linear_rope", "llama_llama3rope", "llama_yarn", "qwen2", "qwen3"],
)
def test_converted_model_equals_its_source(shared_fixtures: Path, name: str):
    source = shared_fixtures / "fixtures" / "arch" / name
    converted = shared_fixtures / "fixtures" / "formats" / f"gguf_arch_{name}"
    loaded, expected = load(converted), load(source)
    assert loaded.keys() == expected.keys()
    for key, tensor in expected.items():
        np.testing.assert_array_equal(loaded[key], tensor, err_msg=key)
    config = ModelConfig.from_hf(load_hf_config(source))
    from_gguf = ModelConfig.from_hf(load_hf_config(converted))
    # The file does not say what the weights were stored in before.
    assert from_gguf == dataclasses.replace(config, dtype="bfloat16")


def test_gemma_norms_lose_the_one_that_the_converter_added(shared_fixtures: Path):
    fixtures = shared_fixtures / "fixtures"
    expected = load_file(fixtures / "arch" / "gemma" / "model.safetensors")
    tensors = open_tensors(fixtures / "formats" / "gguf_arch_gemma")
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        # The file holds w + 1, rounded; everything else is untouched.
        rounding = np.spacing(np.abs(expected[name] + 1)) if "norm" in name else 0
        assert (np.abs(read_tensor(tensor, "float32") - expected[name]) <= rounding).all(), name


def sandwich_config(tmp_path: Path, architecture: str, **keys: Any) -> dict[str, Any]:
    writer = gguf_writer(tmp_path / f"{architecture}.gguf", architecture, **keys)
    for name in ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.full(32, 1.5, np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((64, 32), np.float32))
    close_writer(writer)
    return load_hf_config(tmp_path / f"{architecture}.gguf")


GEMMA_KEYS = {"attention.sliding_window": 16, "attention.key_length": 24}


def test_gemma3_config_and_names(tmp_path: Path):
    config = ModelConfig.from_hf(sandwich_config(tmp_path, "gemma3", **GEMMA_KEYS, block_count=7))
    assert config.architecture == "Gemma3ForCausalLM"
    assert [layer.window for layer in config.layers] == [16] * 5 + [None, 16]
    ropes = [layer.rope.theta for layer in config.layers if layer.rope is not None]
    assert ropes == [1e4] * 5 + [1e6, 1e4]
    assert config.attention_scale == 24**-0.5
    assert config.tied
    tensors = open_tensors(tmp_path / "gemma3.gguf")
    assert set(tensors) == {
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.pre_feedforward_layernorm.weight",
        "model.layers.0.post_feedforward_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
    }
    norm = read_tensor(tensors["model.layers.0.self_attn.q_norm.weight"], "float32")
    np.testing.assert_array_equal(norm, np.full(32, 0.5, np.float32))


def test_gemma2_config(tmp_path: Path):
    keys = {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0}
    config = ModelConfig.from_hf(sandwich_config(tmp_path, "gemma2", **GEMMA_KEYS, **keys))
    assert [layer.window for layer in config.layers] == [16, None]
    assert (config.attention_soft_cap, config.logit_soft_cap) == (40.0, 20.0)
    assert config.attention_scale == 24**-0.5


@pytest.mark.parametrize(("architecture", "depth"), [("gemma2", 46), ("gemma3", 62)])
def test_largest_gemma_scales_queries_by_its_width(tmp_path: Path, architecture: str, depth: int):
    config = sandwich_config(tmp_path, architecture, **GEMMA_KEYS, block_count=depth)
    assert config["query_pre_attn_scalar"] == 32 // 4


def test_llama_with_a_window_is_mistral(tmp_path: Path):
    config = ModelConfig.from_hf(
        sandwich_config(tmp_path, "llama", **{"attention.sliding_window": 16})
    )
    assert config.architecture == "MistralForCausalLM"
    assert {layer.window for layer in config.layers} == {16}


def test_numbers_are_those_that_were_written():
    hf = load_hf_config(FORMATS / "gguf_q4_1")
    source = json.loads((FORMATS / "gguf_q4_1" / "config.hf_source.json").read_text())
    assert hf["rms_norm_eps"] == source["rms_norm_eps"] == 1e-5
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        assert hf[name] == source[name]


def test_generation_ends_at_every_end_token(tmp_path: Path):
    writer = gguf_writer(tmp_path / "model.gguf")
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    close_writer(writer)
    assert load_generation_config(tmp_path)["eos_token_id"] == [2, 7]


# ---- Damaged and unsupported files ----


def test_unknown_architecture(tmp_path: Path):
    close_writer(gguf_writer(tmp_path / "model.gguf", "mamba"))
    with pytest.raises(UnsupportedModelError, match=r"architecture 'mamba'.*supported are llama"):
        load_hf_config(tmp_path)


def test_unsupported_block_type_is_named(tmp_path: Path):
    writer = gguf_writer(tmp_path / "model.gguf")
    packed = np.zeros((64, 66), np.uint8)  # rows of 256 values
    writer.add_tensor("token_embd.weight", packed, raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    close_writer(writer)
    with pytest.raises(CheckpointError, match=r"'token_embd\.weight' has the type IQ2_XXS.*Q4_K"):
        load_hf_config(tmp_path)


def test_unknown_rope_scaling(tmp_path: Path):
    keys = {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}
    with pytest.raises(UnsupportedModelError, match="rope scaling 'longrope'"):
        sandwich_config(tmp_path, "llama", **keys)


def test_rope_factors_of_no_known_rule(tmp_path: Path):
    writer = gguf_writer(tmp_path / "model.gguf")
    writer.add_tensor("token_embd.weight", np.zeros((64, 32), np.float32))
    writer.add_tensor("rope_freqs.weight", np.array([3, 1, 2, 7], np.float32))
    close_writer(writer)
    with pytest.raises(UnsupportedModelError, match="not those of Llama 3"):
        load_hf_config(tmp_path)


def test_missing_key_is_named(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((64, 32), np.float32))
    close_writer(writer)
    with pytest.raises(CheckpointError, match=r"no key llama\.attention\.head_count"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize("keep", [3, 20, 2000, 20_000, -5000])
def test_truncated_file(tmp_path: Path, keep: int):
    content = (FORMATS / "gguf_q4_1" / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=r"model\.gguf is (truncated|no GGUF)"):
        load_hf_config(tmp_path)


def test_damaged_header(tmp_path: Path):
    content = bytearray((FORMATS / "gguf_q4_1" / "model.gguf").read_bytes())
    content[24:32] = b"\xff" * 8  # the length of the first key
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated or damaged inside its header"):
        load_hf_config(tmp_path)
    content[4:8] = (3).to_bytes(4, "big")
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"GGUF version 50331648.*little-endian"):
        load_hf_config(tmp_path)


def test_missing_gguf_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=re.escape('pip install "jpaged[gguf]"')):
        load_hf_config(FORMATS / "gguf_q4_1")


def split_model(tmp_path: Path) -> list[Path]:
    parts = [tmp_path / f"tiny-{n:05d}-of-00002.gguf" for n in (1, 2)]
    for number, part in enumerate(parts):
        writer = gguf_writer(part) if number == 0 else gguf.GGUFWriter(part, "llama")
        writer.add_uint16("split.count", 2)
        writer.add_uint16("split.no", number)
        name = ("token_embd.weight", "output_norm.weight")[number]
        writer.add_tensor(name, np.full((64, 32) if number == 0 else 32, number, np.float32))
        close_writer(writer)
    return parts


def test_split_file_is_read_whole_from_any_part(tmp_path: Path):
    for path in (tmp_path, *split_model(tmp_path)):
        tensors = open_tensors(path)
        assert set(tensors) == {"model.embed_tokens.weight", "model.norm.weight"}
        assert read_tensor(tensors["model.norm.weight"], "float32").tolist() == [1.0] * 32


def test_missing_part_is_named(tmp_path: Path):
    first, second = split_model(tmp_path)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"one of 2 parts.*tiny-00002-of-00002\.gguf is"):
        open_tensors(first)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="one of 2 parts, but its name does not end in"):
        open_tensors(tmp_path / "renamed.gguf")
