"""Files to configs, parameters and tokenizers. Nothing here imports torch."""

from jpaged.loading.dtypes import cpu_has_bf16, name_dtype, resolve_dtype
from jpaged.loading.load import (
    find_checkpoint,
    head_name,
    load_generation_config,
    load_hf_config,
    load_hf_config_alone,
    load_params,
    open_params,
    open_tensors,
    read_params,
)
from jpaged.loading.tokenizer import load_tokenizer

__all__ = [
    "cpu_has_bf16",
    "find_checkpoint",
    "head_name",
    "load_generation_config",
    "load_hf_config",
    "load_hf_config_alone",
    "load_params",
    "load_tokenizer",
    "name_dtype",
    "open_params",
    "open_tensors",
    "read_params",
    "resolve_dtype",
]
