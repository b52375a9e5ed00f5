"""Files to configs, parameters and tokenizers. Nothing here imports torch."""

from jpaged.loading.dtypes import cpu_has_bf16, resolve_dtype
from jpaged.loading.load import (
    find_checkpoint,
    load_generation_config,
    load_hf_config,
    load_params,
    open_tensors,
)
from jpaged.loading.tokenizer import load_tokenizer

__all__ = [
    "cpu_has_bf16",
    "find_checkpoint",
    "load_generation_config",
    "load_hf_config",
    "load_params",
    "load_tokenizer",
    "open_tensors",
    "resolve_dtype",
]
