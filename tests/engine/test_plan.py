"""Plans on paper: known models' numbers, the engine's own arithmetic, and advice that holds."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jpaged.config import CacheConfig, EngineConfig, ModelConfig
from jpaged.engine import capacity
from jpaged.engine.plan import DEVICES, GIB, Hardware, Plan, advice, make_plan, num_parameters
from jpaged.engine.plan_text import as_json, as_table
from jpaged.errors import ConfigError
from jpaged.models.prepare import param_bytes, prepare
from jpaged.models.registry import abstract_params

ARCH = Path(__file__).resolve().parent.parent / "fixtures" / "arch"
HF_70B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "torch_dtype": "float16",
}
BIG = ModelConfig.from_hf(HF_70B)


def on(device: str = "a100-80g", tp: int = 1, pp: int = 1, **fields: Any) -> Hardware:
    defaults = {"dtype": "float16"}
    return Hardware(
        device=device,
        device_bytes=int(DEVICES[device] * GIB),
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        **(defaults | fields),
    )


def config(max_model_len: Any = 40_960, **cache: Any) -> EngineConfig:
    return EngineConfig(max_model_len=max_model_len, cache=CacheConfig(**cache))


def sliding(window: int | None, every: int = 1) -> ModelConfig:
    """A small model, one of `every` layers with the window."""
    model = replace(BIG, layers=BIG.layers[:4], num_heads=8, hidden_size=512, vocab_size=512)
    layers = [
        replace(layer, window=window if i % every == 0 else None)
        for i, layer in enumerate(model.layers)
    ]
    return replace(model, layers=tuple(layers), num_kv_heads=8)


def test_a_70b_model_on_four_devices():
    plan = make_plan(BIG, config(), on(tp=4))
    assert plan.num_parameters == 70_553_706_496  # Llama 3 70B
    assert plan.kv_bytes_per_token == 327_680
    assert plan.stages[0].block_bytes == 16 * 327_680 // 4
    norms = 161 * 8192
    assert plan.weight_bytes == 2 * ((plan.num_parameters - norms) // 4 + norms)
    assert plan.requested_bytes == int(0.92 * int(79.1 * GIB))
    used = plan.weight_bytes + plan.activation_bytes + plan.rows_bytes + plan.kv_cache_bytes
    free = plan.requested_bytes - used
    assert 0 < free < plan.kv_cache_bytes / 100  # one array of 160, and less than a block
    assert plan.kv_cache_tokens == plan.num_blocks * 16
    assert plan.max_concurrency == plan.num_blocks / 2560
    assert plan.fits


def test_tokens_and_requests_as_vllm_reports_them():
    plan = make_plan(BIG, config(num_gpu_blocks_override=40_202), on("h200", tp=4))
    assert plan.kv_cache_tokens == 643_232
    assert f"{plan.max_concurrency:.2f}" == "15.70"
    rounded = make_plan(BIG, config(40_961, num_gpu_blocks_override=40_202), on("h200", tp=4))
    assert rounded.max_blocks_per_request == 2561  # a block more for one token more
    by_bytes = config(kv_cache_memory_bytes=1000 * 1_310_720 + 5, gpu_memory_utilization=0.5)
    plan = make_plan(BIG, by_bytes, on("h200", tp=4))
    assert plan.num_blocks == 1000


@pytest.mark.parametrize("name", sorted(path.name for path in ARCH.iterdir()))
def test_parameters_and_weights_are_those_of_the_model(name: str):
    model = ModelConfig.from_hf(json.loads((ARCH / name / "config.json").read_text()))
    extras = {} if model.post_norms else {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
    for one in (model, replace(model, **extras), replace(model, tied=not model.tied)):
        canonical = abstract_params(one, "bfloat16")
        assert num_parameters(one) == param_bytes(canonical) // 2
        serving = jax.eval_shape(lambda tree, one=one: prepare(tree, one, "bfloat16"), canonical)
        plan = make_plan(one, config(None), on(dtype="bfloat16"))
        assert plan.weight_bytes == param_bytes(serving)


@pytest.mark.parametrize("head_dtype", ["auto", "float32"])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_quantized_weights_are_those_of_the_model(bits: Any, head_dtype: Any):
    model = ModelConfig.from_hf(json.loads((ARCH / "qwen3" / "config.json").read_text()))
    model = replace(model, qkv_bias=True, hidden_size=48)  # the last of two groups is half empty
    canonical = abstract_params(model, "bfloat16")
    head = None if head_dtype == "auto" else head_dtype
    serving = jax.eval_shape(
        lambda tree: prepare(tree, model, "bfloat16", head, quantization=bits), canonical
    )
    asked = EngineConfig(quantization=bits, head_dtype=head_dtype)
    plan = make_plan(model, asked, on(dtype="bfloat16"))
    assert plan.weight_bytes == param_bytes(serving)
    assert f"parameters in bfloat16, matrices in {bits}" in as_table(plan, [])
    assert json.loads(as_json(plan, []))["quantization"] == bits


def test_a_quantized_model_takes_less_and_room_for_a_matrix_as_floats():
    plain, quantized = (
        make_plan(BIG, replace(config(4096), quantization=bits), on("h200"))
        for bits in (None, "int8")
    )
    assert quantized.weight_bytes == pytest.approx(0.54 * plain.weight_bytes, rel=0.01)
    floats = quantized.activation_bytes - plain.activation_bytes
    assert floats == 4 * BIG.vocab_size * BIG.hidden_size


def test_what_numbers_a_file_has_is_not_planned():
    with pytest.raises(ConfigError, match=r"gguf.*does not read; plan with int8 for Q8_0"):
        make_plan(BIG, EngineConfig(quantization="gguf"), on())


def test_one_device_gets_the_pool_that_the_engine_makes():
    small = replace(BIG, layers=BIG.layers[:8], max_position=32_768)
    for max_model_len in (4096, "auto"):
        plan = make_plan(small, config(max_model_len), on("a100-40g"))
        gpu = SimpleNamespace(
            platform="gpu",
            memory_stats=lambda plan=plan: {
                "bytes_limit": plan.hardware.device_bytes,
                "bytes_in_use": plan.weight_bytes,
            },
        )
        engine, num_blocks = capacity.fit_pool(
            config(max_model_len).resolved(small, "gpu"), small, "float16", gpu
        )
        assert plan.num_blocks * 127 / 128 <= num_blocks <= plan.num_blocks
        assert engine.max_model_len == plan.max_model_len


# --- several devices ---


def test_kv_heads_are_replicated_where_there_are_too_few():
    eight, sixteen = (make_plan(BIG, config(), on("h200", tp=tp)) for tp in (8, 16))
    assert sixteen.stages[0].block_bytes == eight.stages[0].block_bytes
    assert sixteen.kv_bytes_per_token == 327_680
    assert any("lies on 2 devices" in note for note in sixteen.notes)
    assert not any("lies on" in note for note in eight.notes)


def test_a_pipeline_splits_layers_as_vllm_and_the_fullest_stage_decides():
    plan = make_plan(BIG, config(), on(pp=3, tp=2))
    assert [stage.num_layers for stage in plan.stages] == [27, 27, 26]
    table = 64_128 * 8192
    first, middle, last = (stage.weight_bytes // 2 for stage in plan.stages)
    assert first - middle == table
    layer = middle // 27
    assert last == 26 * layer + table + 8192
    assert plan.num_blocks == min(stage.num_blocks for stage in plan.stages)
    assert plan.weight_bytes == max(stage.weight_bytes for stage in plan.stages)
    one = make_plan(BIG, config(), on("b200"))
    assert sum(stage.weight_bytes for stage in make_plan(BIG, config(), on(pp=5)).stages) == (
        one.weight_bytes
    )


@pytest.mark.parametrize(
    ("tp", "pp", "told"),
    [
        (3, 1, "tensor_parallel_size=3 does not divide num_heads=64"),
        (1, 81, "pipeline_parallel_size=81 exceeds the 80 layers"),
    ],
)
def test_what_can_not_be_split_is_refused(tp: int, pp: int, told: str):
    with pytest.raises(ConfigError, match=told):
        make_plan(BIG, config(), on(tp=tp, pp=pp))
    odd = replace(BIG, num_heads=48, num_kv_heads=6)
    with pytest.raises(ConfigError, match="neither divides num_kv_heads=6 nor"):
        make_plan(odd, config(), on(tp=4))


# --- windows ---


def test_windows_count_as_in_vllm_if_all_layers_have_them():
    asked = EngineConfig(max_model_len=16_384, max_num_seqs=64, max_num_batched_tokens=1024)
    windowed = make_plan(sliding(1024), asked, on("l4"))
    assert windowed.max_blocks_per_request == 129
    assert windowed.max_concurrency == windowed.num_blocks / 129
    assert windowed.notes[0] == "blocks behind the window of 1024 tokens are given back"
    mixed = make_plan(sliding(1024, every=2), asked, on("l4"))
    assert mixed.max_blocks_per_request == 1024  # where vLLM has 1024 + 129 of half the layers
    assert mixed.notes[0].startswith("2 of 4 layers have a window; they keep all blocks")
    assert make_plan(sliding(None), asked, on("l4")).max_blocks_per_request == 1024


# --- what does not fit ---


def test_it_tells_what_is_missing_and_advice_that_makes_room():
    asked, hardware = config(131_072), on()
    plan = make_plan(BIG, asked, hardware)
    assert not plan.fits
    enough = replace(hardware, device_bytes=hardware.device_bytes + int(plan.missing_bytes / 0.92))
    assert make_plan(BIG, asked, replace(enough, device_bytes=enough.device_bytes + 2)).fits
    assert not make_plan(BIG, asked, replace(enough, device_bytes=enough.device_bytes - 2)).fits
    found = advice(BIG, asked, hardware)
    assert found == ["--tensor-parallel-size 4", "--pipeline-parallel-size 4"]
    assert make_plan(BIG, asked, on(tp=4)).fits
    assert not make_plan(BIG, asked, on(tp=2)).fits
    assert advice(BIG, asked, on(tp=4)) == []


def test_the_longest_context_that_fits_is_advised_and_is_auto():
    found = advice(BIG, config(131_072), on(tp=2))
    (length,) = (int(line.split()[1]) for line in found if line.startswith("--max-model-len"))
    plan = make_plan(BIG, config(length), on(tp=2))
    assert plan.fits
    assert make_plan(BIG, config("auto"), on(tp=2)).max_model_len == length
    assert plan.max_blocks_per_request * 16 == length
    assert make_plan(BIG, config(131_072), on(tp=2)).longest_model_len == length


def test_each_piece_of_advice_alone_makes_room():
    small = replace(BIG, layers=BIG.layers[:20], max_position=32_768)  # 18 B parameters
    hardware = on("a100-80g", dtype="float32")
    found = dict(line.split() for line in advice(small, config(None), hardware))
    assert set(found) >= {"--dtype", "--tensor-parallel-size", "--device"}
    halved = replace(hardware, dtype=found["--dtype"])
    assert make_plan(small, config(None), halved).fits
    assert make_plan(small, config(None), on(found["--device"], dtype="float32")).fits
    tight = config(32_768, num_gpu_blocks_override=100)
    assert advice(small, tight, on())[:2] == [
        "--max-model-len 1584",
        "no --num-gpu-blocks-override",
    ]


def test_an_override_that_the_device_can_not_hold_does_not_fit():
    small = replace(BIG, layers=BIG.layers[:8])
    most = make_plan(small, config(4096, gpu_memory_utilization=1.0), on("a100-40g")).num_blocks
    assert make_plan(small, config(4096, num_gpu_blocks_override=most), on("a100-40g")).fits
    beyond = config(4096, num_gpu_blocks_override=2 * most)
    assert not make_plan(small, beyond, on("a100-40g")).fits


# --- how it is told ---


def test_the_line_of_json_has_every_field():
    plan = make_plan(BIG, config(131_072), on())
    line = as_json(plan, ["turn this"])
    assert "\n" not in line
    told = json.loads(line)
    assert set(told) == set(Plan.__dataclass_fields__) | {"advice"}
    assert told["advice"] == ["turn this"]
    assert told["hardware"]["device"] == "a100-80g"
    assert told["stages"][0]["num_layers"] == 80
    assert told["fits"] is False


def test_the_table_tells_the_numbers():
    told = as_table(make_plan(BIG, config(), on(tp=4)), [])
    for part in ("70.55 B parameters in float16", "4 x a100-80g", "327,680", "It fits."):
        assert part in told
    told = as_table(make_plan(BIG, config(), on()), ["--tensor-parallel-size 4"])
    assert "It does not fit: a device lacks" in told
    assert "This alone makes room: --tensor-parallel-size 4" in told
