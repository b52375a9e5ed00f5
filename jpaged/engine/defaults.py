"""What a model's makers recommend: default sampling parameters, and the tokens that end an output.

As vLLM's `generation_config`: "auto" reads the model's own file, "vllm" takes end-of-sequence ids
from it alone, and a folder's file is read in its place. Only values that stand in a file count;
Hugging Face's own defaults, such as top_k=50, do not.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jpaged import loading
from jpaged.errors import ConfigError, RequestError
from jpaged.loading.safetensors import read_json
from jpaged.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Names in the file -> ours."""


@dataclasses.dataclass(frozen=True)
class Defaults:
    """eos_ids: tokens that end an output, the tokenizer's own first. params: what a request takes
    that brings none."""

    eos_ids: Sequence[int] = ()
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)


def read_defaults(
    model: Any,
    tokenizer: Any,
    vocab_size: int,
    *,
    generation_config: str | Path = "auto",
    override: Mapping[str, Any] | None = None,
) -> Defaults:
    """The defaults of a model.

    model: its path; anything else has no file. generation_config: "auto", "vllm", or a folder with
    a generation_config.json; where that names no end of sequence, the model's counts.
    override: values in the file's names that win over it, whichever is read.

    A value in a file that a request could not take is left out, with a warning. Raises ConfigError
    for an override that can not be taken and for a folder without the file.
    """
    own = loading.load_generation_config(model) if isinstance(model, str | Path) else {}
    chosen, source = own, FILE
    if generation_config not in ("auto", "vllm"):
        source = str(_file_in(generation_config))
        chosen = {"eos_token_id": own.get("eos_token_id")} | read_json(Path(source))
    recommended = {} if generation_config == "vllm" else _recommended(chosen, source)
    params = SamplingParams(**recommended | _overrides(override or {}))
    _log(params, source if recommended else None)
    return Defaults(_eos_ids(chosen.get("eos_token_id"), tokenizer, vocab_size), params)


def _file_in(folder: str | Path) -> Path:
    if not (file := Path(folder) / FILE).is_file():
        raise ConfigError(
            f"generation_config={str(folder)!r} is neither auto nor vllm nor a folder that holds "
            f"{FILE}"
        )
    return file


def _recommended(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    taken = {}
    for theirs, ours in NAMES.items():
        if (value := values.get(theirs)) is None:
            continue
        try:
            SamplingParams(**{ours: value})
        except RequestError as error:
            logger.warning("%s: %s=%r is left out: %s", source, theirs, value, error)
        else:
            taken[ours] = value
    return taken


def _overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"override_generation_config must be a dict, got {values!r:.80}")
    if unknown := [name for name in values if name not in NAMES]:
        raise ConfigError(
            f"override_generation_config has no use for {unknown[0]!r}; it takes {', '.join(NAMES)}"
        )
    renamed = {NAMES[name]: value for name, value in values.items() if value is not None}
    try:
        SamplingParams(**renamed)
    except RequestError as error:
        raise ConfigError(f"override_generation_config: {error}") from None
    return renamed


def _eos_ids(listed: Any, tokenizer: Any, vocab_size: int) -> list[int]:
    """The tokenizer's own first, as vLLM, then the others."""
    listed = listed if isinstance(listed, list | tuple) else [listed]
    given = [getattr(tokenizer, "eos_token_id", None), *listed]
    ids: list[int] = []
    for value in given:
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size:
            ids.append(value)
        elif value is not None:
            logger.warning(
                "eos_token_id %r is left out: no id of %d tokens of vocabulary", value, vocab_size
            )
    return list(dict.fromkeys(ids))


def _log(params: SamplingParams, source: str | None) -> None:
    values = ", ".join(f"{name}={getattr(params, name)}" for name in NAMES.values())
    if source is None:
        logger.info("Default sampling parameters: %s", values)
    else:
        logger.info(
            "Default sampling parameters: %s; from %s, which generation_config='vllm' ignores",
            values,
            source,
        )
