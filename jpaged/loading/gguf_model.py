"""A GGUF file in Hugging Face's terms: its config, and its tensors by their names there.

The tables below are all that is known of an architecture: which class it is, how its tensors are
called, and what llama.cpp's converter did to them, which is undone here.
"""

import math
import re
from typing import Any, NamedTuple

import numpy as np

from jpaged.errors import CheckpointError, UnsupportedModelError
from jpaged.loading.gguf import GGUFFile, Metadata
from jpaged.loading.stored import NumpyArray, StoredTensor, read_tensor

ROPE_FREQS = "rope_freqs.weight"

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class _Family(NamedTuple):
    """What an architecture of llama.cpp is called and does."""

    hf_class: str
    model_type: str
    names: dict[str, str]
    pairs: bool = False  # query and key rows lie as rotated pairs, not as two halves
    norm_offset: float = 0.0  # added to a norm's weight on the way in


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "llama", _LAYER, pairs=True),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2", _LAYER),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3", _LAYER),
    "gemma": _Family("GemmaForCausalLM", "gemma", _LAYER, norm_offset=-1.0),
    "gemma2": _Family("Gemma2ForCausalLM", "gemma2", _SANDWICH, norm_offset=-1.0),
    "gemma3": _Family("Gemma3ForCausalLM", "gemma3_text", _SANDWICH, norm_offset=-1.0),
}


def hf_tensors(file: GGUFFile) -> dict[str, StoredTensor]:
    """The file's tensors by Hugging Face's names, as they are there once read.

    A tensor that no table names keeps its own name, for the loader to report.
    """
    family, keys = _family(file), _Keys(file)
    heads = {"self_attn.q_proj": keys.num_heads, "self_attn.k_proj": keys.num_kv_heads}
    tensors = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FREQS:
            continue  # the config tells of it
        name = _hf_name(name, family.names)
        if name.endswith("norm.weight"):
            tensor = tensor._replace(offset=family.norm_offset)
        if family.pairs and (num_heads := heads.get(".".join(name.split(".")[3:5]))):
            tensor = tensor._replace(row_order=_halves_of_pairs(tensor.shape[0], num_heads))
        tensors[name] = tensor._replace(name=name)
    return tensors


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The model's config as a Hugging Face `config.json` would have it.

    Raises:
        UnsupportedModelError: the architecture, or a setting of it, is not implemented.
        CheckpointError: a key that the architecture needs is missing.
    """
    family, keys = _family(file), _Keys(file)
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(
            f"{file.path} has no tensor 'token_embd.weight'; it is no whole model"
        )
    config = {
        "architectures": [family.hf_class],
        "model_type": family.model_type,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": keys.need("embedding_length"),
        "intermediate_size": keys.need("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": keys.num_heads,
        "num_key_value_heads": keys.num_kv_heads,
        "head_dim": keys.head_dim,
        "max_position_embeddings": keys.need("context_length"),
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.get("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(file, keys),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16",  # the file's own types are those of its packing
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    return config | _EXTRAS[family.model_type](file, keys, config)


class _Keys:
    """The metadata of the file's own architecture: `get("x")` reads `llama.x`."""

    def __init__(self, file: GGUFFile):
        self.path, self.metadata = file.path, file.metadata
        self.prefix = file.metadata["general.architecture"]
        self.num_heads: int = self.need("attention.head_count")
        self.num_kv_heads: int = self.get("attention.head_count_kv", self.num_heads)
        if not (isinstance(self.num_heads, int) and isinstance(self.num_kv_heads, int)):
            raise UnsupportedModelError(
                f"{self.path} has a number of heads for each layer; jpaged needs one for all"
            )
        width = self.need("embedding_length") // self.num_heads
        self.head_dim: int = self.get(
            "attention.key_length", self.get("rope.dimension_count", width)
        )

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.prefix}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(
                f"{self.path} has no key {self.prefix}.{key!s}; convert the model again"
            )
        return value


def _family(file: GGUFFile) -> _Family:
    name = file.metadata.get("general.architecture")
    if name not in _FAMILIES:
        raise UnsupportedModelError(
            f"{file.path} has the architecture {name!r}, which is not supported; "
            f"supported are {', '.join(_FAMILIES)}"
        )
    return _FAMILIES[name]


def _hf_name(name: str, layer_names: dict[str, str]) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    if layer is None:
        return f"{_TOP[stem]}.{kind}" if stem in _TOP else name
    return f"model.layers.{layer}.{layer_names[stem]}.{kind}" if stem in layer_names else name


def _halves_of_pairs(num_rows: int, num_heads: int) -> NumpyArray:
    """Where each row goes: a head's rows x0 y0 x1 y1 ... become x0 x1 ... y0 y1 ..."""
    rows = np.arange(num_rows).reshape(num_heads, 2, -1)
    return rows.swapaxes(1, 2).reshape(-1)


# ---- Rope ----


def _rope_scaling(file: GGUFFile, keys: _Keys) -> dict[str, Any] | None:
    if ROPE_FREQS in file.tensors:
        return _llama3_scaling(file, keys)
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": keys.need("rope.scaling.factor")}
    if kind == "linear":
        return scaling
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{file.path} has the rope scaling {kind!r}; supported are linear, yarn and llama3"
        )
    optional = {
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": keys.get("rope.scaling.attn_factor"),
    }
    return scaling | {name: value for name, value in optional.items() if value is not None}


def _llama3_scaling(file: GGUFFile, keys: _Keys) -> dict[str, Any]:
    """Llama 3's settings, found again from the divisors that they were turned into.

    Only the ratios of the original length to the two frequency factors show in the divisors, so
    that the usual factors 1 and 4 lose nothing; the length is a power of two in practice.
    """
    divisors = read_tensor(file.tensors[ROPE_FREQS], "float32")
    theta = keys.get("rope.freq_base", 10_000.0)
    wavelengths = 2 * math.pi * theta ** (np.arange(0, keys.head_dim, 2) / keys.head_dim)
    for length in (2**power for power in range(4, 24)):
        scaling = {
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": length,
        }
        if np.allclose(_llama3_divisors(wavelengths, scaling), divisors, rtol=1e-5, atol=0):
            return scaling
    raise UnsupportedModelError(
        f"{file.path} has rope factors that are not those of Llama 3 (frequency factors 1 and 4)"
    )


def _llama3_divisors(wavelengths: NumpyArray, scaling: dict[str, Any]) -> NumpyArray:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelengths
    kept = np.clip((turns - low) / (high - low), 0, 1)  # 1: left alone, 0: divided by the factor
    return 1 / ((1 - kept) / scaling["factor"] + kept)


# ---- What single families add ----


def _llama(file: GGUFFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    del config
    extras: dict[str, Any] = {
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    if (window := keys.get("attention.sliding_window")) is not None:
        mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        extras |= mistral | {"sliding_window": window}
    return extras


def _qwen2(file: GGUFFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    del file, keys, config
    return {"use_sliding_window": False}


def _qwen3(file: GGUFFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return _qwen2(file, keys, config) | {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


def _gemma(file: GGUFFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    del file, keys, config
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(file: GGUFFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(file, keys, config) | {
        "sliding_window": keys.need("attention.sliding_window"),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(config, largest=46),
    }


def _gemma3(file: GGUFFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    pattern = keys.get("attention.sliding_window_pattern", 6)
    if not isinstance(pattern, int):
        raise UnsupportedModelError(
            f"{file.path} lists the local layers one by one; jpaged reads a pattern length"
        )
    return _gemma(file, keys, config) | {
        "sliding_window": keys.need("attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "rope_theta": keys.get("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": keys.get("rope.freq_base_swa", 10_000.0),
        "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(config, largest=62),
        "attention_bias": False,
    }


def _query_scalar(config: dict[str, Any], *, largest: int) -> int:
    """Not in the file. The 27B models, known by their depth, scale by hidden size over heads."""
    if config["num_hidden_layers"] == largest:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


_EXTRAS = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}


def eos_token_ids(metadata: Metadata) -> list[int]:
    """Every token that ends an answer: the text's end, and the ends of a turn and a message."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.get(f"tokenizer.ggml.{name}") for name in names]
    return sorted({token_id for token_id in ids if token_id is not None})
