"""Hugging Face directories: shards, index, names, shapes, and every way in which they break."""

import json
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.errors import CheckpointError, UnsupportedModelError
from jpaged.loading import load_generation_config, load_hf_config, load_params
from jpaged.model_config import ModelConfig
from tests.loading.checkpoints import (
    LLAMA,
    TINY,
    by_name,
    copy_llama,
    read_folder,
    shard_names,
    tiny_tensors,
    write_hf,
)


def load(path: Path, dtype: str = "float32") -> dict[str, np.ndarray]:
    config = ModelConfig.from_hf(load_hf_config(path))
    return by_name(config, load_params(path, config, dtype))


def assert_same(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(got[name], np.asarray(tensor), err_msg=name)


def test_sharded_checkpoint_loads_exactly():
    assert len(set(shard_names(LLAMA).values())) == 4
    assert_same(load(LLAMA), read_folder(LLAMA))


def test_params_are_a_plain_tree_with_numbered_layers():
    config = ModelConfig.from_hf(load_hf_config(LLAMA))
    params = load_params(LLAMA, config, "float32")
    assert set(params) == {"model", "lm_head"}
    assert list(params["model"]["layers"]) == [0, 1]
    assert params["model"]["layers"][1]["self_attn"]["k_proj"]["weight"].shape == (32, 64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_conversion_rounds_to_nearest(dtype: str):
    expected = {name: jnp.asarray(t).astype(dtype) for name, t in read_folder(LLAMA).items()}
    assert_same(load(LLAMA, dtype), expected)


@pytest.mark.parametrize(
    "name", ["llama_bfloat16", "llama_float16", "llama_bias_tied", "qwen2", "qwen3", "gemma3_text"]
)
def test_shared_checkpoints_load_exactly(shared_fixtures: Path, name: str):
    folder = shared_fixtures / "fixtures" / "arch" / name
    expected = read_folder(folder)
    dtype = next(iter(expected.values())).dtype.name
    assert_same(load(folder, dtype), expected)
    assert ModelConfig.from_hf(load_hf_config(folder)).dtype == dtype


def test_buffers_and_a_redundant_head_are_ignored(tmp_path: Path):
    config = {**TINY, "tie_word_embeddings": True}
    tensors = tiny_tensors(config)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].copy(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    assert_same(load(write_hf(tmp_path, config, tensors | extra)), tensors)


def test_names_without_the_decoder_prefix(tmp_path: Path):
    tensors = tiny_tensors()
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert_same(load(write_hf(tmp_path, TINY, bare)), tensors)


def test_dtype_absent_from_the_config_is_that_of_the_weights(tmp_path: Path):
    config = {name: value for name, value in TINY.items() if name != "torch_dtype"}
    tensors = {name: jnp.asarray(t, jnp.bfloat16) for name, t in tiny_tensors().items()}
    assert load_hf_config(write_hf(tmp_path, config, tensors))["torch_dtype"] == "bfloat16"


def test_values_beyond_float16_are_refused(tmp_path: Path):
    tensors = tiny_tensors()
    tensors["model.norm.weight"][3] = 1e5
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight'.*100000, .*65504.*bfloat16"):
        load(write_hf(tmp_path, TINY, tensors), "float16")


def test_missing_shard_is_named(tmp_path: Path):
    model = copy_llama(tmp_path)
    (model / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 4 shards.*model-00003-of-00004"):
        load(model)


def test_tensor_missing_from_its_shard_is_named(tmp_path: Path):
    model = copy_llama(tmp_path)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00004.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"00001-of-00004.*no tensor 'model\.norm\.weight'"):
        load(model)


def test_tensor_missing_from_the_checkpoint_is_named(tmp_path: Path):
    tensors = tiny_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(
        CheckpointError, match=r"lacks 1 tensors: model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load(write_hf(tmp_path, TINY, tensors))


def test_unknown_tensors_are_listed(tmp_path: Path):
    extra = {f"model.layers.{i}.self_attn.sinks": np.zeros(4, np.float32) for i in range(12)}
    with pytest.raises(
        CheckpointError,
        match=r"12 tensors .*not know: model\.layers\.0\.self_attn\.sinks.* and 4 more",
    ):
        load(write_hf(tmp_path, TINY, tiny_tensors() | extra))


def test_wrong_shape_is_named_with_both_shapes(tmp_path: Path):
    tensors = tiny_tensors() | {"lm_head.weight": np.zeros((63, 32), np.float32)}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is \[63, 32\], not \[64, 32\]"):
        load(write_hf(tmp_path, TINY, tensors))


def test_integer_weights_are_refused_by_name(tmp_path: Path):
    tensors = tiny_tensors()
    norm = {"model.norm.weight": np.ones(32, np.int8)}
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has type I8"):
        load(write_hf(tmp_path, TINY, tensors | norm))


@pytest.mark.parametrize("keep", [0, 5, 100, 5000])
def test_truncated_file(tmp_path: Path, keep: int):
    file = write_hf(tmp_path, TINY, tiny_tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is (truncated|no safetensors)"):
        load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}q\x00" * 200,
        struct.pack("<Q", 20) + b"not json at all" * 3,
        struct.pack("<Q", 10) + b'{"a": 123}',
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}      ' * 2,
    ],
)
def test_file_of_another_kind(tmp_path: Path, content: bytes):
    write_hf(tmp_path, TINY, tiny_tensors())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*(no safetensors|damaged|fill)"):
        load(tmp_path)


def test_broken_config(tmp_path: Path):
    model = copy_llama(tmp_path)
    (model / "config.json").write_text('{"architectures": [')
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON.*line 1"):
        load_hf_config(model)
    (model / "config.json").write_text("[1, 2]")
    with pytest.raises(CheckpointError, match=r"config\.json holds list"):
        load_hf_config(model)
    (model / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has weights, but no config\.json"):
        load_hf_config(model)


def test_broken_index(tmp_path: Path):
    model = copy_llama(tmp_path)
    (model / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json has no weight_map"):
        load(model)


@pytest.mark.parametrize(
    ("place", "method"), [("quantization_config", "gptq"), ("compression_config", "x")]
)
def test_quantized_checkpoints_are_refused_by_method(tmp_path: Path, place: str, method: str):
    config = {**TINY, place: {"quant_method": method}}
    with pytest.raises(UnsupportedModelError, match=f"quant_method '{method}'.*not supported yet"):
        load_hf_config(write_hf(tmp_path, config, tiny_tensors()))


@pytest.mark.parametrize(
    "scheme", [{"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}]
)
def test_scales_of_keys_and_values_alone_are_refused_with_a_way_out(tmp_path: Path, scheme: dict):
    told = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    config = {**TINY, "quantization_config": told}
    with pytest.raises(UnsupportedModelError, match=r"scales for keys.*fp8_per_token_head"):
        load_hf_config(write_hf(tmp_path, config, tiny_tensors()))


def test_generation_config(tmp_path: Path):
    model = copy_llama(tmp_path)
    assert load_generation_config(model)["eos_token_id"] == [2]
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 4], "temperature": 0.6}')
    assert load_generation_config(model) == {"eos_token_id": [2, 4], "temperature": 0.6}
    (model / "generation_config.json").unlink()
    assert load_generation_config(model)["eos_token_id"] == [2]  # from config.json
    (model / "config.json").write_text(json.dumps(TINY))
    assert load_generation_config(model)["eos_token_id"] == []
