"""Weights drawn at random: an engine of a model of which there is nothing but a config."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jpaged import LLM, EngineConfig, ModelConfig, SamplingParams
from jpaged.cli import main
from jpaged.engine.weights import draw
from jpaged.errors import CheckpointError, ConfigError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
OPTIONS = {"skip_tokenizer_init": True, "dtype": "float32", "implementation": "xla"}
SMALL = {"max_model_len": 32, "max_num_seqs": 2, "num_gpu_blocks_override": 8}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_config_is_enough(folder: Path):
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
    outputs = []
    for seed in (0, 0, 1):
        with LLM(folder, load_format="dummy", seed=seed, **OPTIONS, **SMALL) as llm:
            (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
            outputs.append(output.outputs[0])
    assert all(len(one.token_ids) == 4 for one in outputs)
    totals = [one.cumulative_logprob for one in outputs]
    assert np.isfinite(totals).all()
    assert totals[0] == totals[1] != totals[2]


def test_layers_differ_and_norms_multiply_by_one():
    config = EngineConfig(implementation="xla").resolved(ModelConfig.from_hf(CONFIG), "cpu")
    layers = draw(ModelConfig.from_hf(CONFIG), config, "float32")["model"]["layers"]
    pairs = list(zip(*(jax.tree.leaves(layers[i]) for i in range(2)), strict=True))
    matrices = [pair for pair in pairs if pair[0].ndim > 1]
    norms = [pair for pair in pairs if pair[0].ndim == 1]
    assert len(matrices) == 4
    assert len(norms) == 2
    for first, second in matrices:
        assert not (first == second).any()
        assert float(first.std()) == pytest.approx(0.02, rel=0.2)
    assert all((norm == 1).all() for pair in norms for norm in pair)


def test_without_being_asked_for_weights_are_missed(folder: Path):
    with pytest.raises(CheckpointError, match="is no model: looked for"):
        LLM(folder, **OPTIONS, **SMALL)


def test_given_weights_are_not_drawn(folder: Path):
    with pytest.raises(ConfigError, match="params are given"):
        LLM(CONFIG, params={}, load_format="dummy", **OPTIONS, **SMALL)


def test_other_formats_are_refused(folder: Path):
    with pytest.raises(ConfigError, match="load_format='pt' is unknown; choose auto or dummy"):
        LLM(folder, load_format="pt", **OPTIONS, **SMALL)


def test_a_benchmark_needs_no_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]):
    sizes = ["--input-len", "4", "--output-len", "4", "--batch-size", "1", "--num-iters", "1"]
    options = ["--load-format", "dummy", "--dtype", "float32", "--num-decode-steps", "1"]
    asked = ["bench", "latency", "--model", str(folder), *sizes, "--num-iters-warmup", "1"]
    assert main([*asked, *options, "--implementation", "xla"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs_ok"]
