"""Weights on their way to the device: from a checkpoint, or a canonical tree, to the serving tree.

Part by part: of a checkpoint no more than a layer is held as it was before it is laid out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jpaged import loading
from jpaged.config import EngineConfig, ModelConfig
from jpaged.engine import compiled
from jpaged.errors import ConfigError
from jpaged.loading.gguf_groups import has_groups, read_groups
from jpaged.loading.stored import StoredTensor, read_tensor
from jpaged.models.forward import init_part
from jpaged.models.prepare import ServingFormat, join_layers, split_layers
from jpaged.models.registry import abstract_params
from jpaged.typing import Params

# What a file calls dtypes that need not be widened to lose nothing.
_OWN = {"BF16": "bfloat16", "F16": "float16"}


def load(path: str | Path, model: ModelConfig, config: EngineConfig, dtype: str) -> Params:
    """The serving tree of a checkpoint.

    Matrices that are quantized come from the checkpoint's own precision, and with "gguf" are not
    touched where the file has them in groups. Raises CheckpointError.
    """
    form, head = ServingFormat.of(config, dtype), loading.head_name(model)

    def read(tensor: StoredTensor) -> Any:
        is_head = tensor.name == head
        is_matrix = tensor.name.startswith("model.layers.") and len(tensor.shape) == 2
        bits = form.head_bits if is_head else form.bits if is_matrix else None
        if bits is None:
            own = form.head_dtype if is_head else None
            return jax.device_put(read_tensor(tensor, own or dtype))
        if config.quantization == "gguf" and has_groups(tensor):
            return jax.tree.map(jax.device_put, read_groups(tensor))
        return jax.device_put(read_tensor(tensor, _OWN.get(tensor.dtype, "float32")))

    stored = loading.open_params(path, model)
    return _lay_out(stored, model, form, lambda part: loading.read_params(part, read))


def draw(model: ModelConfig, config: EngineConfig, dtype: str) -> Params:
    """The serving tree of a model with random weights, the same for the same `config.seed`."""
    keys = jax.random.split(jax.random.key(config.seed % 2**32), model.num_layers + 1)
    parts = iter(keys)
    return _lay_out(
        abstract_params(model, dtype),
        model,
        ServingFormat.of(config, dtype),
        lambda part: init_part(model, part, next(parts)),
    )


def take(params: Params, model: ModelConfig, config: EngineConfig, dtype: str) -> Params:
    """The serving tree of a canonical tree: copies, which the caller's own donations can not hurt.

    config: resolved.

    Raises ConfigError if the tree is not this model's: the names or shapes that differ.
    """
    expected = abstract_params(model, dtype)
    if jax.tree.structure(params) != jax.tree.structure(expected):
        raise ConfigError(f"params are not a tree of this model: {_difference(params, expected)}")
    for (path, got), want in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(expected), strict=True
    ):
        if jnp.shape(got) != want.shape:
            raise ConfigError(
                f"params{jax.tree_util.keystr(path)} has shape {jnp.shape(got)}, "
                f"the model needs {want.shape}"
            )
    if config.quantization == "gguf":
        raise ConfigError(
            'quantization="gguf" serves the numbers of a GGUF file, and params have none; '
            "choose int8 or int4"
        )
    return _lay_out(params, model, ServingFormat.of(config, dtype), lambda part: part)


def _lay_out(
    tree: Params, model: ModelConfig, form: ServingFormat, read: Callable[[Params], Params]
) -> Params:
    ends, layers = split_layers(tree)
    # The largest parts first, while there is least beside them.
    served_ends = compiled.prepare_ends(read(ends), form=form, tied=model.tied)
    served: dict[int, Params] = {}
    for i, layer in layers.items():
        # A part is read while the one before it is laid out: more would only lie and wait.
        jax.block_until_ready(served.get(i - 1, served_ends))
        served[i] = compiled.prepare_layer(read(layer), form=form)
    return join_layers(served_ends, served)


def _difference(params: Params, expected: Params) -> str:
    def names(tree: Params) -> set[str]:
        return {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)}

    missing, unknown = names(expected) - names(params), names(params) - names(expected)
    if not (missing or unknown):
        return "its names are right, its containers are not; give nested dicts of arrays"
    return f"missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]}"
