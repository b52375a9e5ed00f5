"""What a request takes that brings no parameters, and which tokens end it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from jpaged.engine.defaults import read_defaults
from jpaged.errors import CheckpointError, ConfigError
from jpaged.sampling_params import SamplingParams

FILE = "generation_config.json"
ALL = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 99,
}
ALL_OURS = SamplingParams(
    temperature=0.6, top_p=0.9, top_k=50, min_p=0.05, repetition_penalty=1.1, max_tokens=99
)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a model's files, as far as defaults look at them, and gives its path."""

    def write(generation: dict[str, Any] | None, config: dict[str, Any] | None = None):
        (tmp_path / "config.json").write_text(json.dumps(config or {}))
        (tmp_path / "model.safetensors").touch()
        if generation is not None:
            (tmp_path / FILE).write_text(json.dumps(generation))
        return tmp_path

    return write


def read(model: Any, eos: Any = None, **options: Any):
    return read_defaults(model, SimpleNamespace(eos_token_id=eos), 100, **options)


def test_all_of_vllms_values_are_taken(write):
    ignored = {"do_sample": True, "typical_p": 0.3, "penalty_alpha": 0.6, "length_penalty": 2.0}
    assert read(write(ALL | ignored)).params == ALL_OURS


def test_only_values_in_the_file_count(write):
    """Hugging Face's GenerationConfig has had top_k=50 where a file says nothing."""
    assert read(write({"do_sample": True})).params == SamplingParams()
    assert read(write({"top_k": None})).params == SamplingParams()
    assert read(write(None)).params == SamplingParams()


def test_vllm_ignores_them_but_not_the_ends(write):
    model = write(ALL | {"eos_token_id": [5, 7]})
    found = read(model, generation_config="vllm")
    assert found.params == SamplingParams()
    assert found.eos_ids == [5, 7]


@pytest.mark.parametrize("mode", ["auto", "vllm"])
def test_an_override_wins(write, mode):
    found = read(write(ALL), generation_config=mode, override={"temperature": 0, "min_p": None})
    assert found.params.temperature == 0.0
    assert found.params.max_tokens == (99 if mode == "auto" else 16)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"temperature": 3}, "override_generation_config: temperature must be from 0 to 2"),
        ({"max_tokens": 3}, "no use for 'max_tokens'; it takes temperature, "),
        ("hot", "override_generation_config must be a dict, got 'hot'"),
    ],
)
def test_a_wrong_override_is_refused(write, override, said):
    with pytest.raises(ConfigError) as caught:
        read(write({}), override=override)
    assert said in str(caught.value)


def test_another_folders_file(write, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    model = write(ALL | {"eos_token_id": 5})
    with pytest.raises(ConfigError, match="neither auto nor vllm nor a folder that holds"):
        read(model, generation_config=str(other))
    (other / FILE).write_text('{"top_p": 0.5}')
    for folder in (other, str(other)):
        found = read(model, generation_config=folder)
        assert found.params == SamplingParams(top_p=0.5)
        assert found.eos_ids == [5]
    (other / FILE).write_text('{"eos_token_id": [8]}')
    assert read(model, generation_config=other).eos_ids == [8]


def test_the_tokenizers_end_comes_first(write):
    model = write({"eos_token_id": [5, 7, 5]})
    assert read(model, 7).eos_ids == [7, 5]
    assert read(model, 9).eos_ids == [9, 5, 7]
    assert read(write({}, {"eos_token_id": 3})).eos_ids == [3]
    assert read(write({})).eos_ids == []


def test_a_model_without_files():
    found = read({"some": "config"}, 4, override={"top_k": 3})
    assert (found.eos_ids, found.params) == ([4], SamplingParams(top_k=3))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("max_new_tokens", {}),
    ],
)
def test_a_bad_value_in_the_file_is_left_out_with_a_warning(write, caplog, name, value):
    others = {theirs: ALL[theirs] for theirs in ALL if theirs != name}
    found = read(write(ALL | {name: value}))
    assert found.params == read(write(others)).params
    assert f"{FILE}: {name}={value!r} is left out" in caplog.text


@pytest.mark.parametrize("value", ["</s>", -1, 100, True, 2.0, {}])
def test_a_bad_end_is_left_out_with_a_warning(write, caplog, value):
    assert read(write({"eos_token_id": [value, 6]})).eos_ids == [6]
    assert f"eos_token_id {value!r} is left out" in caplog.text


def test_a_damaged_file_is_named(write):
    model = write({})
    (model / FILE).write_text("{")
    with pytest.raises(CheckpointError, match=FILE):
        read(model)


def test_the_effective_defaults_are_logged(write, caplog):
    caplog.set_level("INFO", logger="jpaged")
    read(write(ALL), override={"top_k": 3})
    told = "temperature=0.6, top_p=0.9, top_k=3, min_p=0.05, repetition_penalty=1.1, max_tokens=99"
    assert f"Default sampling parameters: {told}; from {FILE}" in caplog.text
    caplog.clear()
    read(write(ALL), generation_config="vllm")
    assert "temperature=1.0, top_p=1.0, top_k=0" in caplog.text
    assert FILE not in caplog.text
