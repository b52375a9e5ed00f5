"""Small checkpoints for the loader's tests, whole and damaged."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import load_file, save_file

from jpaged.model_config import ModelConfig
from jpaged.models.registry import canonical_paths

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
LLAMA = FIXTURES / "arch" / "llama_sharded"

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def copy_llama(folder: Path) -> Path:
    """A writable copy of the sharded Llama fixture."""
    return shutil.copytree(LLAMA, folder / "model")


def shard_names(model: Path) -> dict[str, str]:
    return json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]


def read_folder(model: Path) -> dict[str, jax.Array]:
    """All tensors of a Hugging Face directory by another reader."""
    if (model / "model.safetensors").is_file():
        return load_file(model / "model.safetensors")
    tensors: dict[str, jax.Array] = {}
    for shard in sorted(set(shard_names(model).values())):
        tensors |= load_file(model / shard)
    return tensors


def write_hf(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: jnp.asarray(t) for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def tiny_tensors(config: Mapping[str, Any] = TINY, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under the names and shapes of a config."""
    from jpaged.models.registry import abstract_params

    rng = np.random.default_rng(seed)
    model_config = ModelConfig.from_hf(config)
    tree = abstract_params(model_config, "float32")
    tensors = {}
    for name, path in canonical_paths(model_config).items():
        leaf = tree
        for key in path:
            leaf = leaf[key]
        tensors[name] = rng.normal(size=leaf.shape).astype(np.float32)
    return tensors


def by_name(config: ModelConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The leaves of a canonical tree under the checkpoint's names."""
    found = {}
    for name, path in canonical_paths(config).items():
        leaf: Any = params
        for key in path:
            leaf = leaf[key]
        found[name] = np.asarray(leaf)
    return found


def gguf_writer(path: Path, architecture: str = "llama", **keys: Any) -> gguf.GGUFWriter:
    """A writer with the keys of the tiny model; `keys` adds or replaces, with _ for the dots."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (_TINY_KEYS | keys).items():
        name = f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    return writer


_TINY_KEYS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def close_writer(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
