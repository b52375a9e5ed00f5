"""Which kernels an engine runs, and that none changes what it says."""

import random

import pytest

from jpaged import LLM
from jpaged.config import EngineConfig, ModelConfig
from jpaged.engine import implementation
from jpaged.errors import ConfigError, NativeUnavailableError
from jpaged.native import build, library
from tests.engine import test_mixes as mixes
from tests.engine.test_llm import GREEDY, PROMPTS, tiny_params, tokens_of
from tests.models.test_model_config import LLAMA
from tests.native.kernels import load_or_skip

OPTIONS = {
    "max_model_len": 64,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_decode_steps": 4,
}


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_hf(LLAMA)


@pytest.fixture
def nothing_loaded(monkeypatch):
    """As in a new process."""
    monkeypatch.setattr(library, "_targets", {})


def run(config, **options):
    with LLM(model=config, params=tiny_params(config, 0), **(OPTIONS | options)) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        return tokens_of(outputs), llm.snapshot().implementation


def test_native_tokens_are_xlas(config):
    load_or_skip()
    wanted, name = run(config, dtype="float32", implementation="xla")
    assert name == "xla"
    assert run(config, dtype="float32", implementation="native") == (wanted, "native")


@pytest.mark.slow  # test_mixes runs natively too, in float32
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_request_of_a_mix_gets_natively_what_it_gets_alone(config, dtype):
    """Deterministic mode, with preemptions: tokens and log-probabilities equal to the bit."""
    load_or_skip()
    asked = {"num_gpu_blocks_override": 20, "implementation": "native", "dtype": dtype}
    options = mixes.OPTIONS | asked
    with LLM(model=config, params=tiny_params(config, 0), **options) as llm:
        rng = random.Random(0)
        work = [mixes.draw_request(rng) for _ in range(mixes.NUM_REQUESTS)]
        alone = mixes.run_alone(llm, work)
        for place, found in mixes.run_mixed(llm, work, rng).items():
            assert found == alone[place], place
        assert llm.stats.num_preemptions > 0


def test_auto_is_native_and_the_start_up_says_so(config, caplog):
    load_or_skip()
    caplog.set_level("INFO", logger="jpaged")
    with LLM(model=config, params=tiny_params(config, 0), **OPTIONS) as llm:
        assert llm.snapshot().implementation == llm.engine.config.implementation == "native"
    assert "kernels are native" in caplog.text


def test_without_a_compiler_auto_is_xla_and_one_line_says_why(
    config, caplog, monkeypatch, nothing_loaded
):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    caplog.set_level("INFO", logger="jpaged")
    with LLM(model=config, params=tiny_params(config, 0), **OPTIONS) as llm:
        assert llm.snapshot().implementation == "xla"
    assert caplog.text.count("no C++ compiler") == 1
    assert "kernels are xla" in caplog.text


def refuse(folder):
    raise NativeUnavailableError(f"can not write {folder}")


def test_native_that_can_not_be_had_is_an_error_with_the_reason(monkeypatch):
    monkeypatch.setattr(library, "load", refuse)
    with pytest.raises(ConfigError, match=r'"native" can not be had: can not write .*auto or xla'):
        implementation.resolve(EngineConfig(implementation="native"))
    assert implementation.resolve(EngineConfig()).implementation == "xla"


def test_xla_compiles_no_kernel(monkeypatch):
    monkeypatch.setattr(library, "load", refuse)
    config = EngineConfig(implementation="xla")
    assert implementation.resolve(config) is config


def test_native_is_for_a_cpu(config):
    with pytest.raises(ConfigError, match="CPU alone"):
        EngineConfig(implementation="native").resolved(config, "gpu")
    assert EngineConfig().resolved(config, "gpu").implementation == "xla"
