"""Architectures to classes, and the parameters that a model has: names, paths and shapes."""

import functools as ft
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from jpaged.errors import UnsupportedModelError
from jpaged.model_config import ModelConfig
from jpaged.models.llama import CausalLM

MODELS: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": CausalLM,
    "MistralForCausalLM": CausalLM,
    "Qwen2ForCausalLM": CausalLM,
    "Qwen3ForCausalLM": CausalLM,
    "Gemma2ForCausalLM": CausalLM,
    "Gemma3ForCausalLM": CausalLM,
}

Path = tuple[str | int, ...]


@ft.lru_cache(maxsize=16)
def abstract_model(config: ModelConfig, *, fused: bool) -> tuple[Any, dict[str, Any]]:
    """The graph definition and the float32 `ShapeDtypeStruct` tree of a model; makes no weights.

    fused: the serving tree of `prepare` instead of the canonical one.
    """
    if config.architecture not in MODELS:
        raise UnsupportedModelError(
            f"architecture={config.architecture!r} has no model class; "
            f"there are {', '.join(sorted(MODELS))}"
        )
    build = ft.partial(MODELS[config.architecture], config, fused=fused)
    graphdef, state = nnx.split(nnx.eval_shape(build))
    return graphdef, nnx.to_pure_dict(state)


def abstract_params(config: ModelConfig, dtype: DTypeLike) -> dict[str, Any]:
    """The canonical tree as `jax.ShapeDtypeStruct`s: what loaders fill and trainers see."""
    _, tree = abstract_model(config, fused=False)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)


def canonical_paths(config: ModelConfig) -> dict[str, Path]:
    """Each parameter's checkpoint name and its path in the canonical tree.

    "model.layers.0.mlp.up_proj.weight": ("model", "layers", 0, "mlp", "up_proj", "weight")
    """
    _, tree = abstract_model(config, fused=False)
    paths = (tuple(key.key for key in path) for path, _ in jax.tree.leaves_with_path(tree))
    return {".".join(map(str, path)): path for path in paths}
