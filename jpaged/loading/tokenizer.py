"""A model's tokenizer with its chat template, as transformers' class, from either kind of model."""

import logging
from pathlib import Path
from typing import Any

from jpaged.errors import CheckpointError
from jpaged.loading.gguf import open_gguf
from jpaged.loading.load import find_checkpoint
from jpaged.loading.safetensors import read_json

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")

# By `model_type`, classes that `AutoTokenizer` takes when a folder names them.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
_QWEN2, _GEMMA = ("Qwen2Tokenizer", "Qwen2TokenizerFast"), ("GemmaTokenizer", "GemmaTokenizerFast")
_TAKEN = {
    "llama": (*_GENERIC, "GPT2Tokenizer", "GPT2TokenizerFast"),
    "qwen2": _QWEN2,
    "qwen3": _QWEN2,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
}


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer that lies with a model: a `transformers.PreTrainedTokenizerBase`.

    For a directory what `AutoTokenizer` gives; for a GGUF file one built from its metadata.

    Raises:
        CheckpointError: the directory has no tokenizer files, or they cannot be read.
        UnsupportedModelError: a GGUF file's tokenizer is of an unknown kind.
    """
    checkpoint = find_checkpoint(path, needs_weights=False)
    _quiet_transformers()
    if checkpoint.kind == "gguf":
        return _from_gguf(checkpoint.path)
    if not any((checkpoint.path / name).is_file() for name in _FILES):
        raise CheckpointError(
            f"{checkpoint.path} has no tokenizer: looked for {', '.join(_FILES)}; fetch its files"
        )
    import transformers

    try:
        name = _class_name(checkpoint.path) or "AutoTokenizer"
        chosen = getattr(transformers, name)
        return chosen.from_pretrained(str(checkpoint.path), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"the tokenizer in {checkpoint.path} does not load: {error}"
        ) from error


def _class_name(folder: Path) -> str | None:
    """The class that `AutoTokenizer` chooses, where two files leave no doubt; None: ask it.

    To ask it imports torch where that is installed, which takes seconds and 200 MiB.
    """
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json", "config.json")]
    if not all(file.is_file() for file in files):
        return None
    own, model = map(read_json, files[1:])
    named = str(own.get("tokenizer_class"))
    if "auto_map" in own or named not in _TAKEN.get(str(model.get("model_type")), ()):
        return None
    return _GENERIC[0] if named in _GENERIC else named.removesuffix("Fast")


def _from_gguf(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    from jpaged.loading.gguf_tokenizer import build_tokenizer, special_token

    metadata = open_gguf(path).metadata
    return PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(metadata),
        bos_token=special_token(metadata, "bos"),
        eos_token=special_token(metadata, "eos"),
        unk_token=special_token(metadata, "unknown"),
        pad_token=special_token(metadata, "padding"),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _quiet_transformers() -> None:
    """Keeps transformers from warning that torch is absent, which here it always may be."""
    logging.getLogger("transformers").addFilter(_is_not_about_torch)


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()
