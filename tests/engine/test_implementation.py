"""Which kernels an engine runs, and that none changes what it says."""

import random
from typing import Any, NamedTuple

import jax
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

CPU = jax.devices("cpu")[0]
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
@pytest.mark.parametrize(
    ("name", "dtype"), [("native", "float32"), ("native", "bfloat16"), ("pallas", "float32")]
)
def test_each_request_of_a_mix_gets_what_it_gets_alone(config, name, dtype):
    """Deterministic mode, with preemptions: tokens and log-probabilities equal to the bit."""
    if name == "native":
        load_or_skip()
    asked = {"num_gpu_blocks_override": 20, "implementation": name, "dtype": dtype}
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
        implementation.resolve(EngineConfig(implementation="native"), device=CPU)
    assert implementation.resolve(EngineConfig(), device=CPU).implementation == "xla"


def test_xla_compiles_no_kernel(monkeypatch):
    monkeypatch.setattr(library, "load", refuse)
    config = EngineConfig(implementation="xla")
    assert implementation.resolve(config, device=CPU) is config


def test_native_is_for_a_cpu(config):
    with pytest.raises(ConfigError, match="CPU alone"):
        EngineConfig(implementation="native").resolved(config, "gpu")
    assert EngineConfig().resolved(config, "gpu").implementation == "auto"


class Gpu(NamedTuple):
    """What is asked of a device."""

    device_kind: str = "NVIDIA A100-SXM4-80GB"
    compute_capability: str = "8.0"
    platform: str = "gpu"
    platform_version: str = "PJRT C API\ncuda 12090"

    @property
    def client(self):
        return self


def resolve(name: str, device: Any, head_dim: int = 128) -> str:
    config = EngineConfig(implementation=name)  # pyright: ignore[reportArgumentType]
    return implementation.resolve(config, device=device, head_dim=head_dim).implementation


@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_auto_is_pallas_on_a_gpu(head_dim):
    for gpu in (Gpu(), Gpu("NVIDIA H200", "9.0"), Gpu("NVIDIA B200", "10.0")):
        assert resolve("auto", gpu, head_dim) == resolve("pallas", gpu, head_dim) == "pallas"
        assert resolve("xla", gpu, head_dim) == "xla"


@pytest.mark.parametrize(
    ("gpu", "head_dim", "reason"),
    [
        (Gpu("Tesla T4", "7.5"), 128, "Tesla T4 has compute capability 7.5, below 8.0"),
        (Gpu("AMD Instinct MI300X", "gfx942", platform_version="rocm 6"), 128, "no NVIDIA GPU"),
        (Gpu(), 512, "head dim 512 is above 256"),
    ],
)
def test_where_kernels_do_not_run_auto_is_xla_and_one_line_says_why(gpu, head_dim, reason, caplog):
    assert resolve("auto", gpu, head_dim) == "xla"
    assert caplog.text.count(reason) == 1
    with pytest.raises(ConfigError, match=rf'"pallas" can not be had: .*{reason}.*auto or xla'):
        resolve("pallas", gpu, head_dim)


def test_the_log_says_when_kernels_are_interpreted():
    config = EngineConfig(implementation="pallas")
    assert implementation.resolve(config, device=CPU, head_dim=16) == config
    assert implementation.describe(config, CPU) == "pallas, interpreted"
    gpu: Any = Gpu()
    assert implementation.describe(config, gpu) == "pallas"
