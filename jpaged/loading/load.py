"""From a path to a config and parameters. A model is a directory or a file on this machine.

Accepted are a Hugging Face directory with safetensors weights, a .gguf file, and a directory that
holds one. Parameters come in the canonical tree: nested dicts by Hugging Face's names, layers by
number, weights of linear maps as [out, in].
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from jpaged.errors import CheckpointError, UnsupportedModelError
from jpaged.loading import gguf, gguf_model, safetensors
from jpaged.loading.stored import NumpyArray, StoredTensor, read_tensor
from jpaged.model_config import ModelConfig
from jpaged.models.registry import abstract_params
from jpaged.typing import Array, Params

_CONFIG = "config.json"
_SHOWN = 8  # names in an error message
# Buffers that older checkpoints carry and the config already tells.
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")


class Checkpoint(NamedTuple):
    """Where a model lies: a directory of kind `hf`, or a file of kind `gguf`."""

    kind: Literal["hf", "gguf"]
    path: Path


def find_checkpoint(path: str | Path, *, needs_weights: bool = True) -> Checkpoint:
    """Tells what kind of model a path is, by the files that are there.

    needs_weights: without, a directory with a config.json is one too.

    Raises:
        CheckpointError: it is no model, or none that can be read; says what was looked for.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; a model is a directory with {_CONFIG} and safetensors files, "
            "or a .gguf file, on this machine (nothing is downloaded)"
        )
    if path.is_file():
        return _file_checkpoint(path)
    if any((path / name).is_file() for name in (safetensors.WEIGHTS, safetensors.INDEX)):
        if not (path / _CONFIG).is_file():
            raise CheckpointError(f"{path} has weights, but no {_CONFIG}; fetch it as well")
        return Checkpoint("hf", path)
    models = [file for file in sorted(path.glob("*.gguf")) if gguf.first_part(file)]
    if len(models) == 1:
        return Checkpoint("gguf", models[0])
    if not needs_weights and (path / _CONFIG).is_file():
        return Checkpoint("hf", path)
    raise CheckpointError(_why_no_model(path, models))


def _file_checkpoint(path: Path) -> Checkpoint:
    with path.open("rb") as file:
        magic = file.read(len(gguf.MAGIC))
    if magic == gguf.MAGIC or path.suffix == ".gguf":
        return Checkpoint("gguf", path)
    if path.suffix in (".safetensors", ".json"):
        raise CheckpointError(f"{path} is one file of a model; give its directory, {path.parent}")
    raise CheckpointError(f"{path} is no GGUF file (it begins with {magic!r}) and no directory")


def _why_no_model(path: Path, gguf_files: list[Path]) -> str:
    if gguf_files:
        names = ", ".join(file.name for file in gguf_files[:_SHOWN])
        return f"{path} holds several GGUF files ({names}); give the path of one"
    if pickles := sorted(file.name for file in path.glob("pytorch_model*.bin")):
        return (
            f"{path} has its weights in {pickles[0]} only, a pickle that jpaged does not read; "
            "convert it once with transformers and torch: AutoModelForCausalLM.from_pretrained("
            "DIR).save_pretrained(NEW_DIR), and copy the tokenizer's files"
        )
    return (
        f"{path} is no model: looked for {safetensors.WEIGHTS}, {safetensors.INDEX} "
        "and one *.gguf file, and found none"
    )


def load_hf_config(path: str | Path, *, needs_weights: bool = True) -> dict[str, Any]:
    """The model's config as a Hugging Face dict, from `config.json` or a GGUF file's metadata.

    A checkpoint that does not name its dtype gets that of its first tensor, if weights are needed.

    Raises:
        CheckpointError: as `find_checkpoint`, or the file is damaged.
        UnsupportedModelError: a quantized checkpoint, or an unknown architecture in a GGUF file.
    """
    checkpoint = find_checkpoint(path, needs_weights=needs_weights)
    if checkpoint.kind == "gguf":
        return gguf_model.hf_config(gguf.open_gguf(checkpoint.path))
    config = safetensors.read_json(checkpoint.path / _CONFIG)
    _refuse_quantized(checkpoint.path, config)
    if needs_weights and not (config.get("dtype") or config.get("torch_dtype")):
        first = next(iter(safetensors.open_shards(checkpoint.path).values()))
        names = {"F16": "float16", "BF16": "bfloat16"}
        config["torch_dtype"] = names.get(first.dtype, "float32")
    return config


def load_hf_config_alone(path: str | Path) -> dict[str, Any]:
    """`load_hf_config` where weights need not be: also of a `config.json`, or a directory with one.

    Raises:
        CheckpointError, UnsupportedModelError: as `load_hf_config`.
    """
    try:
        return load_hf_config(path)
    except CheckpointError:
        file = Path(path) / _CONFIG if Path(path).is_dir() else Path(path)
        if file.suffix != ".json" or not file.is_file():
            raise
    config = safetensors.read_json(file)
    _refuse_quantized(file, config)
    return config


def _refuse_quantized(path: Path, config: Mapping[str, Any]) -> None:
    keys = ("quantization_config", "compression_config")
    places = (config, config.get("text_config") or {})
    if found := [place[key] for place in places for key in keys if place.get(key)]:
        method = found[0].get("quant_method", "unknown")
        if found[0].get("kv_cache_scheme") and not found[0].get("config_groups"):
            raise UnsupportedModelError(
                f"{path} has scales for keys and values of 8 bits ({method}'s kv_cache_scheme), "
                "which are not read yet; use the checkpoint without them, and perhaps "
                'kv_cache_dtype="fp8_per_token_head", which finds scales by itself'
            )
        raise UnsupportedModelError(
            f"{path} is quantized (quant_method {method!r}), which is not supported yet; "
            "use the unquantized checkpoint, or a GGUF file"
        )


def load_generation_config(path: str | Path) -> dict[str, Any]:
    """The checkpoint's generation defaults, with `eos_token_id` always a list (maybe empty).

    From `generation_config.json`, else from `config.json`, or from a GGUF file's metadata.
    """
    checkpoint = find_checkpoint(path, needs_weights=False)
    if checkpoint.kind == "gguf":
        metadata = gguf.open_gguf(checkpoint.path).metadata
        return {
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
            "eos_token_id": gguf_model.eos_token_ids(metadata),
        }
    generation = {}
    if (file := checkpoint.path / "generation_config.json").is_file():
        generation = safetensors.read_json(file)
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = safetensors.read_json(checkpoint.path / _CONFIG).get("eos_token_id")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return generation | {"eos_token_id": eos}


def open_tensors(path: str | Path) -> dict[str, StoredTensor]:
    """The checkpoint's tensors by Hugging Face's names, none of them read yet."""
    checkpoint = find_checkpoint(path)
    if checkpoint.kind == "gguf":
        return gguf_model.hf_tensors(gguf.open_gguf(checkpoint.path))
    return safetensors.open_shards(checkpoint.path)


def load_params(
    path: str | Path,
    config: ModelConfig,
    dtype: str,
    *,
    head_dtype: str | None = None,
    place: Callable[[NumpyArray], Array] = jax.device_put,
) -> dict[str, Any]:
    """Reads the weights, tensor by tensor, as the canonical parameters in `dtype`; what the LM head
    multiplies with in `head_dtype`, if that is another.

    `place` turns each array into what the tree holds; it decides on devices and sharding. On a CPU
    the default adopts the array, without a copy.

    Raises:
        CheckpointError: as `open_params`.
    """
    head = head_name(config)

    def read(tensor: StoredTensor) -> Array:
        is_head = tensor.name == head
        return place(read_tensor(tensor, (head_dtype or dtype) if is_head else dtype))

    return read_params(open_params(path, config), read)


def open_params(path: str | Path, config: ModelConfig) -> dict[str, Any]:
    """The canonical tree with a `StoredTensor` for each parameter, none of them read yet; each has
    the name of its place in the tree.

    Raises:
        CheckpointError: the checkpoint is damaged, or its tensors are not those of `config`: the
            message lists the missing, the unknown and those of another shape.
    """
    leaves, treedef = jax.tree.flatten_with_path(abstract_params(config, "float32"))
    shapes = {".".join(str(key.key) for key in key_path): leaf.shape for key_path, leaf in leaves}
    stored = _match_names(open_tensors(path), shapes, tied=config.tied)
    _check(path, stored, shapes)
    return jax.tree.unflatten(treedef, [stored[name]._replace(name=name) for name in shapes])


def read_params(stored: Params, read: Callable[[StoredTensor], Any]) -> dict[str, Any]:
    """A tree, or a part of one, with what `read` makes of each tensor."""
    return jax.tree.map(read, dict(stored), is_leaf=lambda x: isinstance(x, StoredTensor))


def head_name(config: ModelConfig) -> str:
    """The name of what the LM head multiplies with."""
    return "model.embed_tokens.weight" if config.tied else "lm_head.weight"


def _match_names(
    stored: dict[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]], *, tied: bool
) -> dict[str, StoredTensor]:
    """Drops what carries nothing, and gives a checkpoint of the bare decoder its prefix."""
    matched = {}
    for name, tensor in stored.items():
        if _IGNORED.fullmatch(name) or (tied and name == "lm_head.weight"):
            continue
        prefixed = f"model.{name}"
        matched[prefixed if name not in shapes and prefixed in shapes else name] = tensor
    return matched


def _check(
    path: str | Path,
    stored: dict[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    problems = []
    if missing := [name for name in shapes if name not in stored]:
        problems.append(f"lacks {len(missing)} tensors: {_listed(missing)}")
    if unknown := [name for name in stored if name not in shapes]:
        problems.append(
            f"has {len(unknown)} tensors that this model does not know: {_listed(unknown)}"
        )
    if wrong := [
        f"{name} is {list(tensor.shape)}, not {list(shapes[name])}"
        for name, tensor in stored.items()
        if name in shapes and tensor.shape != shapes[name]
    ]:
        problems.append(f"has {len(wrong)} tensors of another shape: {_listed(wrong)}")
    if problems:
        raise CheckpointError(f"{path} does not fit its config: it {'; it '.join(problems)}")


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
