"""Models by their shapes alone: a config, of which weights are drawn at random."""

import json
from pathlib import Path
from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        **_LLAMA,
        **_llama3(32.0),
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        **_LLAMA,
        **_llama3(8.0),
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "tiny": {
        **_LLAMA,
        "vocab_size": 128,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
    },
}


def write_config(name: str, folder: Path) -> Path:
    """Writes a model's config.json into a folder, which is then a model without weights."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    return folder


def step_bytes(name: str, *, num_rows: int, context: int) -> int:
    """Bytes that a decode step must read in bfloat16: all matrices, the rows' keys and values."""
    config = CONFIGS[name]
    D, F, C = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    H, K, L = (config[f"num_{x}"] for x in ("attention_heads", "key_value_heads", "hidden_layers"))
    weights = L * (D * (H + 2 * K) * C + H * C * D + 3 * D * F) + D * config["vocab_size"]
    return 2 * (weights + 2 * L * num_rows * context * K * C)


def step_flops(name: str, *, num_rows: int, context: int) -> int:
    """Operations of a decode step: each weight and each visible position twice over."""
    config = CONFIGS[name]
    weights = step_bytes(name, num_rows=0, context=0) // 2
    heads = config["num_attention_heads"] * config["head_dim"]
    return num_rows * (2 * weights + 4 * config["num_hidden_layers"] * heads * context)
