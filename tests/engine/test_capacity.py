"""How many blocks a pool gets and what they hold: vLLM's numbers, and devices made up for it."""

from dataclasses import replace

import pytest

from jpaged.config import CacheConfig, EngineConfig, ModelConfig
from jpaged.engine import capacity


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


def engine(max_model_len: int, batched: int = 1024, *, steps: int = 8, **cache) -> EngineConfig:
    return EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=64,
        max_num_batched_tokens=batched,
        num_decode_steps=steps,
        cache=CacheConfig(**cache),
    )


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
