"""How many blocks a pool gets and what they hold: vLLM's numbers, and devices made up for it."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from jpaged.config import CacheConfig, EngineConfig, ModelConfig
from jpaged.engine import capacity, compiled
from jpaged.errors import ConfigError

CPU = SimpleNamespace(platform="cpu")


@dataclass(frozen=True)
class FakeGPU:
    """As much of a `jax.Device` as capacity planning looks at."""

    bytes_limit: int
    in_use: int = 0
    platform: str = "gpu"
    device_kind: str = "fake"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.bytes_limit, "bytes_in_use": self.in_use}


def shape(num_layers: int = 32, windows: tuple[int | None, ...] = (None,)) -> ModelConfig:
    """Qwen1.5-7B's shape; the layers take the windows in turn."""
    hf = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
        "torch_dtype": "float16",
    }
    model = ModelConfig.from_hf(hf)
    layers = [
        replace(layer, window=windows[i % len(windows)]) for i, layer in enumerate(model.layers)
    ]
    return replace(model, layers=tuple(layers))


def engine(max_model_len: Any, batched: int = 1024, *, steps: int = 8, **cache) -> EngineConfig:
    return EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=64,
        max_num_batched_tokens=batched,
        num_decode_steps=steps,
        cache=CacheConfig(**cache),
    )


def fit(config: EngineConfig, model: ModelConfig, device: Any) -> tuple[EngineConfig, int]:
    return capacity.fit_pool(config, model, "float16", device)


@pytest.mark.parametrize(
    ("windows", "config", "expected"),
    [
        ((None,), engine(16_384), 1024),
        ((None,), engine(16_385), 1025),
        ((1024,), engine(16_384), 129),  # vLLM: ceil((1024 - 1 + 1024) / 16) + 1
        ((512, 1024), engine(16_384), 129),  # the widest counts
        ((1024,), engine(1600), 100),  # never more than the request is long
        ((None, 1024), engine(16_384), 1024),  # a mixed model keeps all blocks
        ((1024,), engine(16_384, 4, steps=256), 81),  # a window of steps writes 256 tokens
        ((1,), engine(16_384, 1, steps=1, block_size=1), 2),
    ],
)
def test_the_most_blocks_of_a_request(windows, config: EngineConfig, expected: int):
    assert capacity.max_blocks_per_request(config, shape(windows=windows)) == expected


# --- vLLM's numbers ---


def test_requests_that_a_pool_holds_as_vllm_counts_them():
    model, config = shape(), engine(16_384)
    assert 1024 * capacity.block_bytes(config, model, "float16") == 8 * 2**30
    assert capacity.max_concurrency(1536, config, model) == 1.5
    assert capacity.kv_cache_tokens(1536, config, model) == 24_576
    long = engine(40_960)
    assert capacity.kv_cache_tokens(40_202, long, shape()) == 643_232
    assert f"{capacity.max_concurrency(40_202, long, shape()):.2f}" == "15.70"
    assert capacity.max_concurrency(258, config, shape(windows=(1024,))) == 2.0


# --- what is asked for, wins ---


@pytest.mark.parametrize("device", [CPU, FakeGPU(80 * 2**30)])
def test_the_override_wins_over_bytes_and_bytes_over_utilization(device):
    model, per_block = shape(), 8 * 2**20
    assert capacity.block_bytes(engine(16_384), model, "float16") == per_block
    by_bytes = engine(16_384, kv_cache_memory_bytes=1025 * per_block + 1)
    assert fit(by_bytes, model, device) == (by_bytes, 1025)
    both = engine(16_384, kv_cache_memory_bytes=per_block, num_gpu_blocks_override=3)
    assert fit(both, model, device) == (both, 3)  # as it is: requests are refused one by one


def test_a_pool_that_can_not_hold_one_request_is_refused_with_the_way_out():
    too_small = engine(16_384, kv_cache_memory_bytes=500 * 8 * 2**20)
    with pytest.raises(
        ConfigError, match=r"needs 8\.008 GiB .* has 3\.906 GiB \(500 blocks\)"
    ) as e:
        fit(too_small, shape(), CPU)
    assert "lower max_model_len to at most 7984" in str(e.value)
    assert fit(replace(too_small, max_model_len=7984), shape(), CPU)[1] == 500
    with pytest.raises(ConfigError):
        fit(replace(too_small, max_model_len=7985), shape(), CPU)


# --- max_model_len auto ---


@pytest.mark.parametrize("auto", ["auto", -1])
def test_auto_is_the_longest_request_that_the_pool_holds(auto, caplog):
    caplog.set_level("INFO", logger="jpaged")
    config, num_blocks = fit(engine(auto, num_gpu_blocks_override=500), shape(), CPU)
    assert (config.max_model_len, num_blocks) == (499 * 16, 500)
    assert "max_model_len auto: 7984 tokens" in caplog.text
    config, _ = fit(engine(auto, num_gpu_blocks_override=10_000), shape(), CPU)
    assert config.max_model_len == 32_768  # no more than the model can


def test_auto_counts_blocks_that_windows_give_back():
    windowed = shape(windows=(1024,))
    config, _ = fit(engine("auto", num_gpu_blocks_override=130), windowed, CPU)
    assert config.max_model_len == 32_768
    config, _ = fit(engine("auto", num_gpu_blocks_override=129), windowed, CPU)
    assert config.max_model_len == 128 * 16


def test_auto_needs_a_pool_of_one_block():
    with pytest.raises(ConfigError, match="needs"):
        fit(engine("auto", kv_cache_memory_bytes=8 * 2**20), shape(), CPU)


@pytest.mark.parametrize("wrong", ["automatic", 0, -2, 1.5, True])
def test_what_is_no_length_is_refused(wrong):
    with pytest.raises(ConfigError, match="max_model_len"):
        engine(wrong)


def test_a_cpu_gives_a_share_of_its_memory_and_stretches_it_for_one_request(monkeypatch):
    monkeypatch.setattr(capacity, "_total_memory", lambda: 20 * 2**30)
    model, per_block = shape(), 8 * 2**20
    assert fit(engine(1600), model, CPU)[1] == 128  # 5% are 1 GiB
    assert fit(engine(1600, cpu_memory_share=0.5), model, CPU)[1] == 10 * 2**30 // per_block
    assert fit(engine(16_384), model, CPU)[1] == 1025  # one request, in half the memory
    config, num_blocks = fit(engine("auto"), model, CPU)
    assert (config.max_model_len, num_blocks) == (127 * 16, 128)  # auto keeps to the share
    few_rows = replace(engine(16), max_num_seqs=2)
    assert fit(few_rows, model, CPU)[1] == 3  # no more than the rows can use
    monkeypatch.setattr(capacity, "_total_memory", lambda: 2**30)
    with pytest.raises(ConfigError, match="needs"):
        fit(engine(16_384), model, CPU)


# --- a GPU's memory ---


def test_a_gpu_gives_what_utilization_leaves_beside_weights_and_programs():
    model, device = shape(), FakeGPU(60 * 2**30, in_use=15 * 2**30)
    config = engine(16_384, gpu_memory_utilization=0.5)
    asked = []

    def measure(config, num_blocks):
        asked.append(num_blocks)
        return 2**30

    _, num_blocks = capacity.fit_pool(config, model, "float16", device, measure, 0.75)
    free = 0.5 * 80 * 2**30 - 15 * 2**30 - 2**30 - capacity.rows_bytes(config)  # 60 are 0.75
    used = num_blocks * 8 * 2**20
    one_array = used / (2 * model.num_layers)
    assert 0.96 * free < used + one_array <= free
    assert len(asked) == 1
    # No more than JAX's allocator has, whatever the utilization.
    most = engine(16_384, gpu_memory_utilization=1.0)
    _, num_blocks = capacity.fit_pool(most, model, "float16", device, measure, 0.75)
    assert num_blocks * 8 * 2**20 < (60 - 15 - 1) * 2**30


def test_the_size_that_was_measured_is_kept_if_it_fits_and_wastes_little():
    model, device, config = shape(), FakeGPU(40 * 2**30), engine(16_384)
    estimate = capacity.estimated_activations(config, model)
    measured = []

    def blocks(own_bytes: int) -> int:
        def measure(config, num_blocks):
            measured.append(num_blocks)
            return own_bytes

        return capacity.fit_pool(config, model, "float16", device, measure)[1]

    assert blocks(estimate) == measured[-1]
    assert blocks(estimate - 2**28) == measured[-1]  # a little would be left over
    assert blocks(0) == measured[-1]  # here the estimate is small
    assert blocks(estimate + 2**30) < measured[-1]  # too large: the next start measures the same
    assert len(set(measured)) == 1
    half = engine(16_384, gpu_memory_utilization=0.3)
    guess = capacity.fit_pool(half, model, "float16", device)[1]
    assert guess == capacity.fit_pool(half, model, "float16", device, lambda c, n: None)[1]


def test_kernels_get_no_pool_of_8_bits_that_they_can_not_address(caplog):
    """Of one layer and 2**16 bytes a block: between 2**31 and 2**32 bytes there is none."""
    caplog.set_level("INFO", logger="jpaged")

    def blocks(gib: float, implementation: Any = "pallas", **cache) -> int:
        config = replace(engine(16_384, **cache), implementation=implementation, max_num_seqs=1024)
        return fit(config, shape(num_layers=1), FakeGPU(int(gib * 2**30)))[1]

    free, halved = 2**31 // 2**16, "32768 blocks instead of"
    assert blocks(12, "xla", kv_cache_dtype="fp8") > free
    assert blocks(12, kv_cache_dtype="auto") > free / 2
    assert blocks(5, kv_cache_dtype="fp8") < free
    assert halved not in caplog.text
    for name in ("fp8", "fp8_e5m2", "int8"):
        assert blocks(12, kv_cache_dtype=name) == free
        assert halved in caplog.text
        assert blocks(12, kv_cache_dtype=name, kv_cache_memory_bytes=6 * 2**30) == free
        assert blocks(20, kv_cache_dtype=name) > 2 * free
        with pytest.raises(ConfigError, match=r"take 32768 or fewer, or 65537 or more"):
            blocks(12, kv_cache_dtype=name, num_gpu_blocks_override=40_000)


def test_a_few_bytes_more_in_use_give_the_same_pool():
    config, sizes = engine(16_384), set()
    for in_use in range(0, 2**26, 2**22):
        device = FakeGPU(41 * 2**30, in_use=in_use)
        sizes.add(capacity.fit_pool(config, shape(), "float16", device)[1])
    assert len(sizes) <= 2  # sixteen starts
    with pytest.raises(ConfigError, match="needs"):
        fit(engine(16_384), shape(), FakeGPU(40 * 2**30, in_use=39 * 2**30))
    assert fit(engine("auto"), shape(), FakeGPU(8 * 2**30))[0].max_model_len < 16_384


def test_the_share_that_jax_may_take_is_the_environments(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert compiled.memory_fraction() == 0.75
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert compiled.memory_fraction() == 0.5
