"""The two scripts around model files: conversion to a Hugging Face directory, and fetching."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from jpaged.loading import load_generation_config, load_hf_config, load_params, load_tokenizer
from jpaged.model_config import ModelConfig
from tests.loading.checkpoints import FIXTURES, by_name, read_folder

GGUF = FIXTURES / "formats" / "gguf_q4_1"
SCRIPTS = FIXTURES.parent.parent / "scripts"


def import_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("shard_bytes", [1 << 30, 200_000])
def test_converted_gguf_is_the_same_model(tmp_path: Path, shard_bytes: int):
    import_script("convert_checkpoint").convert(GGUF, tmp_path / "out", "float32", shard_bytes)
    shards = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    assert (len(shards) > 1) == (shard_bytes == 200_000)
    for shard in shards:
        assert len(shard) == 1 or sum(t.nbytes for t in shard.values()) <= shard_bytes
    config = ModelConfig.from_hf(load_hf_config(GGUF))
    expected = by_name(config, load_params(GGUF, config, "float32"))
    out_config = ModelConfig.from_hf(load_hf_config(tmp_path / "out"))
    assert out_config.dtype == "float32"
    got = by_name(out_config, load_params(tmp_path / "out", out_config, "float32"))
    torch_state = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(got[name], tensor, err_msg=name)
        np.testing.assert_array_equal(torch_state[name].numpy(), tensor, err_msg=name)
    ends = [load_generation_config(path)["eos_token_id"] for path in (GGUF, tmp_path / "out")]
    assert ends == [[2], [2]]
    ids = [load_tokenizer(path)("A few words")["input_ids"] for path in (GGUF, tmp_path / "out")]
    assert ids[0] == ids[1]


def test_conversion_to_bfloat16_halves_the_file(tmp_path: Path):
    import_script("convert_checkpoint").convert(GGUF, tmp_path, "bfloat16")
    assert {str(tensor.dtype) for tensor in read_folder(tmp_path).values()} == {"bfloat16"}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_pieces_are_joined_once_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = import_script("fetch_models")
    site = tmp_path / "site"
    for n in (2, 1):
        data = site / f"toy_part{n}" / "data"
        data.mkdir(parents=True)
        (data / f"toy.gguf.part{n}").write_bytes(b"AB"[n - 1 : n] * 3)
        info = site / f"toy_part{n}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toy-part{n}\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"toy_part{n}/data/toy.gguf.part{n},,\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setitem(script.MODELS, "toy", script.Model(("toy-part1", "toy-part2"), "toy.gguf"))
    path = script.fetch("toy", tmp_path / "cache")
    assert path == tmp_path / "cache" / "toy.gguf"
    assert path.read_bytes() == b"AAABBB"
    written = path.stat().st_mtime_ns
    assert script.fetch("toy", tmp_path / "cache").stat().st_mtime_ns == written
