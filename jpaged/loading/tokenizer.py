"""A model's tokenizer with its chat template, as transformers' class, from either kind of model."""

import logging
from pathlib import Path
from typing import Any

from jpaged.errors import CheckpointError
from jpaged.loading.gguf import open_gguf
from jpaged.loading.load import find_checkpoint

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


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
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(checkpoint.path), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"the tokenizer in {checkpoint.path} does not load: {error}"
        ) from error


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
