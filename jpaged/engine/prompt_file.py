"""Files of prompts: one a line, judged line by line before anything else happens.

A .txt file has a prompt's text on each line. A .jsonl file has a JSON string on each line, or an
object with one of `prompt`, `prompt_token_ids` and `messages`, and optionally an `id`, a
`cache_salt` and fields of `SamplingParams`. Blank lines are passed over.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jpaged.errors import RequestError
from jpaged.sampling_params import SamplingParams

_CONTENT = ("prompt", "prompt_token_ids", "messages")
_OWN_KEYS = {*_CONTENT, "id", "cache_salt"}
_SAMPLING_KEYS = {field.name for field in dataclasses.fields(SamplingParams)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One line: where it stands, its id, its prompt or its chat messages, and its own sampling."""

    where: str  # FILE:LINE
    id: Any
    prompt: dict[str, Any] | None  # as `LLM.generate` takes it
    messages: Sequence[Mapping[str, Any]] | None
    sampling: dict[str, Any]

    @property
    def title(self) -> str:
        """What a person asked, in short."""
        if self.messages is not None:
            return str(self.messages[-1].get("content", ""))
        prompt = self.prompt or {}
        return prompt.get("prompt") or f"{len(prompt['prompt_token_ids'])} token ids"


def read_prompts(path: Path, *, is_chat: bool = False) -> list[PromptLine]:
    """The prompts of a file, in order. is_chat: texts become the message of a user.

    Raises RequestError with the file and line of the first bad one. Ids not given are the prompts'
    places, counted from 0.
    """
    if path.suffix not in (".jsonl", ".txt"):
        raise RequestError(f"{path} must end in .jsonl or .txt, which tells how to read it")
    lines: list[PromptLine] = []
    for where, text in numbered_lines(path):
        entry = text if path.suffix == ".txt" else parse_json(text, where)
        try:
            lines.append(_prompt_line(entry, where, len(lines), is_chat=is_chat))
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None
    if not lines:
        raise RequestError(f"{path} has no prompts")
    return lines


def numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """FILE:LINE and text of each line that is not blank.

    Raises RequestError if the file can not be read.
    """
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if (text := line.rstrip("\r\n")).strip():
                    yield f"{path}:{number}", text
    except OSError as error:
        raise RequestError(f"{path} can not be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 after line {number}: {error.reason}") from error


def parse_json(text: str, where: str) -> Any:
    """The JSON value of a line. Raises RequestError that says where it goes wrong."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: no JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        raise RequestError(f"{where}: no JSON that can be read: {error}") from None


def _prompt_line(entry: Any, where: str, place: int, *, is_chat: bool) -> PromptLine:
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, dict):
        raise RequestError(f"a line is a JSON string or object, got {entry!r:.60}")
    if unknown := sorted(set(entry) - _OWN_KEYS - _SAMPLING_KEYS):
        raise RequestError(
            f"unknown key {unknown[0]!r}; there are {', '.join(sorted(_OWN_KEYS))} "
            "and the fields of SamplingParams"
        )
    given = [key for key in _CONTENT if key in entry]
    if len(given) != 1:
        raise RequestError(f"give one of {', '.join(_CONTENT)}; got {', '.join(given) or 'none'}")
    _CHECKS[given[0]](entry[given[0]])
    messages = entry.get("messages")
    if is_chat and "prompt" in entry:
        messages = [{"role": "user", "content": entry["prompt"]}]
    if messages is not None and "cache_salt" in entry:
        raise RequestError("cache_salt goes with prompt or prompt_token_ids")
    prompt_keys = ("prompt", "prompt_token_ids", "cache_salt")
    return PromptLine(
        where=where,
        id=entry.get("id", place),
        prompt=None if messages else {key: entry[key] for key in prompt_keys if key in entry},
        messages=messages,
        sampling={key: value for key, value in entry.items() if key in _SAMPLING_KEYS},
    )


def _check_text(value: Any) -> None:
    if not isinstance(value, str):
        raise RequestError(f"prompt must be a string, got {value!r:.60}")


def check_token_ids(value: Any) -> None:
    """Raises RequestError unless it is a list of integers, at least one."""
    is_ids = isinstance(value, list) and all(type(token) is int for token in value)
    if not (is_ids and value):
        raise RequestError(f"token ids must be a list of at least one integer, got {value!r:.60}")


def _check_messages(value: Any) -> None:
    is_chat = isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in value
    )
    if not (is_chat and value):
        raise RequestError(
            "messages must be a list of at least one object with role and content, "
            f"got {value!r:.60}"
        )


_CHECKS = {
    "prompt": _check_text,
    "prompt_token_ids": check_token_ids,
    "messages": _check_messages,
}
