"""What a request may ask of its output's form: a grammar to follow, repetition to stop at."""

import dataclasses
import json as json_text
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from jpaged.errors import RequestError
from jpaged.judged_fields import (
    JudgedFields,
    integer,
    optional,
    refused,
    switch,
    text,
    texts,
)

MAX_PATTERN_SIZE = 2**20
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _schema(name: str, value: Any) -> str | dict[str, Any]:
    """A JSON schema, as text or as the object."""
    try:
        if isinstance(value, str):
            json_text.loads(value)
            return str(value)
        if isinstance(value, Mapping):
            json_text.dumps(value := dict(value), allow_nan=False)
            return value
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} is no JSON schema: {error}") from None
    way = "; give its model_json_schema()" if hasattr(value, "model_json_schema") else ""
    raise RequestError(f"{name} must be a JSON schema, a dict or JSON text, got {value!r:.80}{way}")


def _choices(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise RequestError(f"{name} must be a list of strings, got {value!r:.80}")
    if not (listed := texts(name, value)):
        raise RequestError(f"{name} must hold at least one string")
    return listed


def _asked(name: str, value: Any) -> bool | None:
    return None if value is None else switch(name, value) or None


@dataclasses.dataclass
class StructuredOutputsParams(JudgedFields):
    """The form that an output must have: exactly one of the first six.

    json: a JSON schema, as dict or text. regex: a regular expression that all of it matches.
    choice: one of these strings. grammar: a context-free grammar. json_object: True for any JSON
    object. structural_tag: refused.
    disable_any_whitespace: no blanks between the parts of JSON. disable_additional_properties: no
    properties that a schema does not name. whitespace_pattern: a regular expression for the blanks
    between the parts of JSON.

    Raises RequestError, naming the field.
    """

    json: Annotated[str | Mapping[str, Any] | None, optional(_schema)] = None
    regex: Annotated[str | None, optional(text)] = None
    choice: Annotated[Sequence[str] | None, optional(_choices)] = None
    grammar: Annotated[str | None, optional(text)] = None
    json_object: Annotated[bool | None, _asked] = None
    disable_any_whitespace: Annotated[bool, switch] = False
    disable_additional_properties: Annotated[bool, switch] = False
    whitespace_pattern: Annotated[str | None, optional(text)] = None
    structural_tag: Annotated[
        str | None, refused(None, "tags around tool calls are not supported; write a grammar")
    ] = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"give exactly one of {', '.join(KINDS)}; got {' and '.join(given) or 'none'}"
            )

    @property
    def kind(self) -> str:
        """The one of `KINDS` that was given."""
        return next(name for name in KINDS if getattr(self, name) is not None)


@dataclasses.dataclass
class RepetitionDetectionParams(JudgedFields):
    """Ends an output that repeats itself, with the finish reason "repetition".

    It ends once its last tokens are a pattern of min_pattern_size to max_pattern_size tokens,
    min_count times in a row. max_pattern_size: 0 turns it off. min_pattern_size: 0 means 1.
    min_count: at least 2.

    Raises RequestError, naming the field.
    """

    max_pattern_size: Annotated[int, integer(0, MAX_PATTERN_SIZE)] = 0
    min_pattern_size: Annotated[int, integer(0, MAX_PATTERN_SIZE)] = 0
    min_count: Annotated[int, integer(0, MAX_PATTERN_SIZE)] = 0

    def __post_init__(self) -> None:
        if self.min_pattern_size > self.max_pattern_size:
            raise RequestError(
                f"min_pattern_size={self.min_pattern_size} exceeds "
                f"max_pattern_size={self.max_pattern_size}; both 0 turn the detection off"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise RequestError(
                f"min_count must be at least 2, got {self.min_count}; "
                "max_pattern_size=0 turns the detection off"
            )
