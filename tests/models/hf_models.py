"""Tiny random Hugging Face models, made on the spot, and their logits: the oracle of the models."""

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from jpaged.model_config import ModelConfig
from jpaged.models.registry import canonical_paths

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,  # not hidden_size / heads
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
YARN = {"rope_theta": 500.0, "rope_type": "yarn", "factor": 4.0}


class Case(NamedTuple):
    architecture: str
    settings: dict[str, Any]


CASES = {
    "llama": Case("Llama", {}),
    "llama_bias_tied": Case(
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 0.1,
        },
    ),
    "llama_gelu": Case("Llama", {"hidden_act": "gelu"}),
    "llama_linear": Case("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama_dynamic_within": Case(
        "Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}}
    ),
    "llama_dynamic_beyond": Case(
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 3.0},
            "max_position_embeddings": 16,
        },
    ),
    "llama_yarn": Case("Llama", {"rope_parameters": YARN}),
    "llama_yarn_attention_factor": Case(
        "Llama", {"rope_parameters": {**YARN, "attention_factor": 0.7}}
    ),
    "llama_yarn_mscale": Case(
        "Llama",
        {"rope_parameters": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5, "beta_fast": 8.0}},
    ),
    "llama_yarn_untruncated": Case(
        "Llama", {"rope_parameters": {**YARN, "truncate": False, "beta_slow": 2.0}}
    ),
    "llama_llama3": Case(
        "Llama",
        {
            "rope_parameters": {
                "rope_theta": 300.0,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": Case("Mistral", {"sliding_window": 7}),
    "mistral_no_window": Case("Mistral", {"sliding_window": None}),
    "qwen2": Case("Qwen2", {}),
    "qwen2_window": Case(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    ),
    "qwen3": Case("Qwen3", {}),
    "qwen3_bias_window": Case(
        "Qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "gemma2": Case(
        "Gemma2",
        {
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma2_no_caps": Case(
        "Gemma2",
        {"sliding_window": 7, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": Case(
        "Gemma3",
        {
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}


def make_hf_model(case: Case, seed: int = 0) -> Any:
    """The case's model in float32, with weights large enough to show in the logits."""
    name = case.architecture
    kind = "TextConfig" if name == "Gemma3" else "Config"
    # The config keeps and completes the dicts it is given: it gets copies.
    settings = copy.deepcopy({**SIZES, **case.settings})
    config = getattr(transformers, name + kind)(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                std = 0.2 if parameter.ndim == 2 else 0.3
                parameter.add_(std * torch.randn(parameter.shape))
    return model


def hf_config_dict(hf_model: Any) -> dict[str, Any]:
    """The model's config.json, as transformers writes it."""
    return {
        **json.loads(hf_model.config.to_json_string(use_diff=False)),
        "architectures": [type(hf_model).__name__],
    }


def hf_params(hf_model: Any, config: ModelConfig) -> dict[str, Any]:
    return to_params({k: v.numpy() for k, v in hf_model.state_dict().items()}, config)


def hf_logits(hf_model: Any, token_ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return hf_model(torch.tensor(token_ids[None]), use_cache=False).logits[0].numpy()


def to_params(tensors: dict[str, np.ndarray], config: ModelConfig) -> dict[str, Any]:
    """A checkpoint's tensors as the canonical tree. All that the model has must be there."""
    params: dict[str, Any] = {}
    for name, (*parents, leaf) in canonical_paths(config).items():
        node = params
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = jnp.asarray(tensors[name])
    return params


class Fixture(NamedTuple):
    """A stored checkpoint with its reference logits."""

    config: ModelConfig
    params: dict[str, Any]
    token_ids: list[np.ndarray]  # prompt and continuation of each example
    logits: list[np.ndarray]


def read_fixture(folder: Path, config_name: str = "config.json") -> Fixture:
    config = ModelConfig.from_hf(json.loads((folder / config_name).read_text()))
    reference = json.loads((folder / "reference.json").read_text())
    logits = load_file(folder / "reference.safetensors")
    examples = zip(reference["prompts"], reference["greedy"], strict=True)
    return Fixture(
        config,
        to_params(load_file(folder / "model.safetensors"), config),
        [np.array(prompt + greedy, np.int32) for prompt, greedy in examples],
        [logits[f"logits.{i}"] for i in range(len(reference["prompts"]))],
    )
