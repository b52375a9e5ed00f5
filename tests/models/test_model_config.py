"""`ModelConfig.from_hf`: what good configs become, in both styles, and how bad ones are refused."""

from typing import Any

import pytest

from jpaged.errors import ConfigError, UnsupportedModelError
from jpaged.model_config import _FAMILIES, LayerConfig, ModelConfig
from jpaged.models.registry import MODELS
from jpaged.rope_config import RopeConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 8}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
GEMMA2 = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "sliding_window": 8}
GEMMA3 = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 8}


def windows(hf: dict[str, Any]) -> list[int | None]:
    return [layer.window for layer in ModelConfig.from_hf(hf).layers]


def ropes(hf: dict[str, Any]) -> list[RopeConfig | None]:
    return [layer.rope for layer in ModelConfig.from_hf(hf).layers]


def test_a_plain_llama_has_every_field():
    assert ModelConfig.from_hf({**LLAMA, "rope_theta": 5e5, "torch_dtype": "bfloat16"}) == (
        ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=100,
            hidden_size=64,
            intermediate_size=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            max_position=256,
            layers=(LayerConfig(window=None, rope=RopeConfig(theta=5e5, rotary_dim=16)),) * 4,
            dtype="bfloat16",
            rms_norm_eps=1e-5,
            activation="silu",
            tied=False,
            attention_scale=0.25,
        )
    )


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({"num_key_value_heads": None}, "num_kv_heads", 4),
        ({"head_dim": 24}, "head_dim", 24),
        ({"head_dim": None}, "head_dim", 16),
        ({"dtype": "float16"}, "dtype", "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "dtype", "bfloat16"),
        ({}, "dtype", "float32"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "activation", "gelu_tanh"),
        ({"tie_word_embeddings": True}, "tied", True),
        ({"attention_bias": True}, "qkv_bias", True),
        ({"attention_bias": True}, "o_bias", True),
        ({"mlp_bias": True}, "mlp_bias", True),
        ({"pretraining_tp": 2}, "num_layers", 4),
        (
            {"sliding_window": 8, "layer_types": ["sliding_attention"] * 4},
            "dynamic_rope_start",
            None,
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic_rope_start", 256),
    ],
)
def test_a_llama_setting(settings: dict[str, Any], field: str, value: object):
    assert getattr(ModelConfig.from_hf({**LLAMA, **settings}), field) == value


@pytest.mark.parametrize(
    ("hf", "expected"),
    [
        (LLAMA, [None] * 4),
        ({**LLAMA, "sliding_window": 8}, [None] * 4),
        (MISTRAL, [8] * 4),
        ({**MISTRAL, "sliding_window": None}, [None] * 4),
        ({name: v for name, v in MISTRAL.items() if name != "sliding_window"}, [4096] * 4),
        ({**QWEN2, "sliding_window": 8, "max_window_layers": 1}, [None] * 4),
        (
            {**QWEN2, "sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True},
            [None, 8, 8, 8],
        ),
        (
            {
                **QWEN3,
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [8, None, 8, None],
        ),
        (GEMMA2, [8, None, 8, None]),
        (GEMMA3, [8, 8, 8, 8]),
        ({**GEMMA3, "sliding_window_pattern": 3}, [8, 8, None, 8]),
        ({**GEMMA3, "_sliding_window_pattern": 2}, [8, None, 8, None]),
        (
            {**GEMMA3, "sliding_window_pattern": 2, "layer_types": ["full_attention"] * 4},
            [None] * 4,
        ),
    ],
)
def test_windows(hf: dict[str, Any], expected: list[int | None]):
    widest = max((window for window in expected if window), default=None)
    assert ModelConfig.from_hf(hf).widest_window == (None if None in expected else widest)
    assert windows(hf) == expected


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 256),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "dynamic", "factor": 2.5}, 640),
        (YARN, 256),
        (YARN | {"original_max_position_embeddings": 256}, 1024),
        (YARN | {"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 256),
    ],
)
def test_the_longest_context_is_the_one_that_scaling_reaches(scaling, longest: int):
    assert ModelConfig.from_hf({**LLAMA, "rope_scaling": scaling}).max_position == longest


def test_gemma3_names_the_context_that_scaling_has_stretched():
    scaling = {"rope_type": "linear", "factor": 8.0}
    assert ModelConfig.from_hf({**GEMMA3, "rope_scaling": scaling}).max_position == 256


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"theta": 10_000.0}),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, {"theta": 5.0}),
        ({"rope_theta": 5, "rope_scaling": None}, {"theta": 5.0}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"kind": "linear", "factor": 2.0}),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            {"kind": "dynamic", "factor": 2.0, "original_max_position": 256},
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.5,
                    "high_freq_factor": 3.0,
                    "original_max_position_embeddings": 64,
                }
            },
            {
                "kind": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.5,
                "high_freq_factor": 3.0,
                "original_max_position": 64,
            },
        ),
        (
            {"rope_scaling": {**YARN, "factor": 1.0}},
            {"kind": "yarn", "factor": 1.0, "original_max_position": 64},
        ),
        (
            {"rope_scaling": {**YARN, "factor": None, "attention_factor": 0.5, "truncate": False}},
            {
                "kind": "yarn",
                "factor": 4.0,
                "original_max_position": 64,
                "attention_factor": 0.5,
                "truncate": False,
            },
        ),
    ],
)
def test_ropes(settings: dict[str, Any], expected: dict[str, Any]):
    rope = RopeConfig(**{"theta": 10_000.0, "rotary_dim": 16, **expected})
    assert ropes({**LLAMA, **settings}) == [rope] * 4


def test_gemma_3_turns_local_and_global_layers_differently_in_both_styles():
    local = RopeConfig(theta=100.0, rotary_dim=256)
    far = RopeConfig(theta=1000.0, rotary_dim=256, kind="linear", factor=8.0)
    scaling = {"rope_type": "linear", "factor": 8.0}
    v4 = {"rope_theta": 1000.0, "rope_local_base_freq": 100.0, "rope_scaling": scaling}
    v5 = {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {**scaling, "rope_theta": 1000.0},
        }
    }
    for style in (v4, v5):
        assert ropes({**GEMMA3, **style, "sliding_window_pattern": 2}) == [local, far] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["T5Model"]}, r"T5Model.*supported are .*Gemma3.*Llama.*Qwen3"),
        ({"architectures": None}, r"supported are"),
        ({"hidden_act": "relu"}, r"hidden_act='relu'.*silu"),
        ({"hidden_act": None}, r"hidden_act=None"),
        ({"rope_scaling": {"type": "longrope"}}, r"'longrope'.*yarn"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5"),
        ({"use_bidirectional_attention": True}, r"use_bidirectional_attention.*causal"),
    ],
)
def test_what_is_not_implemented_is_refused(settings: dict[str, Any], message: str):
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_hf({**LLAMA, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": None}, r"no 'vocab_size'"),
        ({"hidden_size": "64"}, r"hidden_size='64'.*positive integer"),
        ({"hidden_size": -64}, r"hidden_size=-64"),
        ({"num_attention_heads": 0}, r"num_attention_heads=0"),
        ({"num_attention_heads": True}, r"num_attention_heads=True"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers=0"),
        ({"intermediate_size": 1.5}, r"intermediate_size=1.5"),
        ({"max_position_embeddings": None}, r"no 'max_position_embeddings'"),
        ({"num_key_value_heads": 3}, r"num_heads=4.*multiple.*num_kv_heads=3"),
        ({"num_key_value_heads": 0}, r"num_kv_heads=0"),
        ({"num_attention_heads": 6}, r"hidden_size=64.*num_attention_heads=6.*head_dim"),
        ({"head_dim": 15}, r"rotary_dim=15.*even"),
        ({"rms_norm_eps": "1e-5"}, r"rms_norm_eps='1e-5'"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps=nan"),
        ({"dtype": "int8"}, r"'int8'.*bfloat16"),
        ({"rope_theta": 0}, r"rope_theta=0"),
        ({"rope_theta": None}, r"no 'rope_theta'"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, r"'linear', 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, r"no 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, r"factor=0.5.*>= 1.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": "2"}}, r"factor='2'"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                }
            },
            r"low_freq_factor=4.0 must be below high_freq_factor=1.0",
        ),
    ],
)
def test_a_wrong_value_names_itself(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf({**LLAMA, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_types": ["full_attention"]}, r"1 entries for num_hidden_layers=4"),
        ({"layer_types": ["sliding_attention"] * 4}, r"no 'sliding_window'"),
        (
            {"use_sliding_window": True, "sliding_window": -1, "max_window_layers": 0},
            r"sliding_window=-1",
        ),
    ],
)
def test_contradictory_layers_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf({**QWEN2, **settings})


def test_an_unknown_layer_type_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"'linear_attention'.*sliding_attention"):
        ModelConfig.from_hf({**QWEN3, "layer_types": ["linear_attention"] * 4})


def test_every_architecture_that_can_be_read_has_a_class():
    assert set(_FAMILIES) == set(MODELS)
