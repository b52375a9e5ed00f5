"""Workloads: the requests that a benchmark serves.

A workload is a .jsonl file; each line has `prompt_ids` and `max_tokens`, and optionally `id`, `n`,
`temperature`, `top_p` and `ignore_eos`. The end of sequence is ignored, so that any engine does
equal work.
"""

import dataclasses
import random
from pathlib import Path
from typing import Any

from jpaged.engine.prompt_file import check_token_ids, numbered_lines, parse_json
from jpaged.errors import RequestError
from jpaged.sampling_params import SamplingParams

_KEYS = {"id", "prompt_ids", "max_tokens", "n", "temperature", "top_p", "ignore_eos"}


@dataclasses.dataclass(frozen=True)
class WorkItem:
    """One request of a workload."""

    prompt_ids: list[int]
    params: SamplingParams


def read_workload(
    path: Path, limit: int | None = None, output_len: int | None = None
) -> list[WorkItem]:
    """The requests of a file, or the first `limit`; output_len: in the place of their max_tokens.

    Raises RequestError with file and line.
    """
    items: list[WorkItem] = []
    for where, text in numbered_lines(path):
        entry = parse_json(text, where)
        try:
            items.append(_work_item(entry, output_len))
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None
        if len(items) == limit:
            break
    if not items:
        raise RequestError(f"{path} has no requests")
    return items


def random_workload(
    num_requests: int, *, input_len: int, output_len: int, vocab_size: int, seed: int
) -> list[WorkItem]:
    """Greedy requests of equal lengths, in tokens, with prompts drawn at random."""
    rng = random.Random(seed)
    return [
        WorkItem(rng.choices(range(vocab_size), k=input_len), _params(max_tokens=output_len))
        for _ in range(num_requests)
    ]


def _work_item(entry: Any, output_len: int | None) -> WorkItem:
    if not isinstance(entry, dict) or not {"prompt_ids", "max_tokens"} <= entry.keys() <= _KEYS:
        raise RequestError(
            "a line of a workload is an object with prompt_ids and max_tokens, and optionally "
            f"id, n, temperature, top_p and ignore_eos; got {entry!r:.80}"
        )
    check_token_ids(entry["prompt_ids"])
    if entry["max_tokens"] is None:
        raise RequestError("max_tokens must be from 1, for all engines to do equal work; got None")
    params = _params(
        max_tokens=output_len or entry["max_tokens"],
        n=entry.get("n", 1),
        temperature=entry.get("temperature", 0.0),
        top_p=entry.get("top_p", 1.0),
    )
    return WorkItem(entry["prompt_ids"], params)


def _params(*, temperature: float = 0.0, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, ignore_eos=True, detokenize=False, **fields)
