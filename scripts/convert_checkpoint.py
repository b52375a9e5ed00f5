"""Writes a model that jpaged reads as a Hugging Face directory, unpacked, in the dtype asked for.

python scripts/convert_checkpoint.py model.gguf OUT_DIR --dtype float32
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import jax
from safetensors.flax import save_file

from jpaged.errors import JpagedError
from jpaged.loading import (
    find_checkpoint,
    load_generation_config,
    load_hf_config,
    load_tokenizer,
    open_tensors,
    resolve_dtype,
)
from jpaged.loading.stored import StoredTensor, read_tensor

SHARD_BYTES = 4 << 30


def convert(source: Path, target: Path, dtype: str, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes config, generation defaults, tokenizer and weights of `source` into `target`."""
    config = load_hf_config(source)
    stored_dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = resolve_dtype(dtype, stored_dtype, find_checkpoint(source).kind == "gguf")
    tensors = list(open_tensors(source).values())
    target.mkdir(parents=True, exist_ok=True)
    config.pop("dtype", None)
    write_json(target / "config.json", {**config, "torch_dtype": dtype})
    write_json(target / "generation_config.json", load_generation_config(source))
    load_tokenizer(source).save_pretrained(target)
    write_weights(target, tensors, dtype, shard_bytes)


def write_weights(target: Path, tensors: list[StoredTensor], dtype: str, shard_bytes: int) -> None:
    """One file, or as many as the size asks for and an index of them."""
    shards = list(split(tensors, jax.numpy.dtype(dtype).itemsize, shard_bytes))
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for file, shard in zip(names, shards, strict=True):
        arrays = {t.name: jax.device_put(read_tensor(t, dtype)) for t in shard}
        save_file(arrays, target / file, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {t.name: file for file, s in zip(names, shards, strict=True) for t in s}
        index = {"metadata": {}, "weight_map": weight_map}
        write_json(target / "model.safetensors.index.json", index)


def split(
    tensors: list[StoredTensor], itemsize: int, shard_bytes: int
) -> Iterator[list[StoredTensor]]:
    """Runs of tensors of at most `shard_bytes`, but at least one tensor, each."""
    shard: list[StoredTensor] = []
    size = 0
    for tensor in tensors:
        num_bytes = math.prod(tensor.shape) * itemsize
        if shard and size + num_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += num_bytes
    yield shard


def write_json(path: Path, value: dict) -> None:
    """Readable JSON, without the entries that say nothing."""
    value = {name: entry for name, entry in value.items() if entry is not None}
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a Hugging Face directory or a GGUF file")
    parser.add_argument("target", type=Path, help="the directory to write")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    arguments = parser.parse_args()
    try:
        convert(arguments.source, arguments.target, arguments.dtype)
    except JpagedError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
