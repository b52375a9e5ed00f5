"""Records whose every field is judged when it is set, and the judges.

A judge takes a field's name and a value, and gives the value in its one normal spelling or raises
RequestError that names the field. Knows nothing of what the fields mean.
"""

import dataclasses
import difflib
import operator
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Annotated, Any, ClassVar, Self, get_origin

from jpaged.errors import RequestError

Judge = Callable[[str, Any], Any]

MAX_TOKEN_ID = 2**31 - 1


class JudgedFields:
    """Base of dataclasses whose fields are `name: Annotated[type, judge] = default`.

    A value is judged when the record is made and when it is assigned. Rules between fields belong
    into the dataclass's `__post_init__`; `clone` applies them anew.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Names that are no fields but that people write, with what to write instead."""

    _judges: ClassVar[dict[str, Judge]] = {}
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls) -> None:
        """Finds the judges."""
        hints = cls.__annotations__.items()
        cls._judges = {name: hint.__metadata__[0] for name, hint in hints if _is_judged(hint)}

    def __new__(cls, *_: Any, **values: Any) -> Self:
        """Tells an unknown name in full, where a dataclass would raise a bare TypeError."""
        for name in values:
            cls._check_name(name)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._judges:
            self._check_name(name)
        object.__setattr__(self, name, self._judges[name](name, value))

    @classmethod
    def _check_name(cls, name: str) -> None:
        if name in cls._judges:
            return
        if name in cls.elsewhere:
            raise RequestError(f"{cls.__name__} has no field {name!r}: {cls.elsewhere[name]}")
        near = difflib.get_close_matches(name, cls._judges, n=1)
        way = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(cls._judges)}"
        raise RequestError(f"{cls.__name__} has no field {name!r}; {way}")

    def clone(self) -> Self:
        """An equal record of its own, judged anew: what was assigned must go together."""
        return dataclasses.replace(self)


def _is_judged(hint: Any) -> bool:
    return get_origin(hint) is Annotated


def switch(name: str, value: Any) -> bool:
    """True or False alone."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, got {value!r}")
    return value


def integer(low: int, high: int) -> Judge:
    """Python's, NumPy's or JAX's; Python's comes out, which does not overflow."""

    def judge(name: str, value: Any) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool):
            raise RequestError(f"{name} must be an integer, got {value!r}")
        if not low <= number <= high:
            raise RequestError(f"{name} must be from {low} to {high}, got {number}")
        return number

    return judge


def real(low: float, high: float) -> Judge:
    """A number, never NaN."""

    def judge(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise RequestError(f"{name} must be a number, got {value!r}")
        number: Any = value  # an integer may be too large for a float
        if not low <= number <= high:
            raise RequestError(f"{name} must be from {low:g} to {high:g}, got {value}")
        return float(number)

    return judge


def text(name: str, value: Any) -> str:
    """A string that is not empty."""
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, got {value!r:.80}")
    if not value:
        raise RequestError(f"{name} must not be an empty string")
    return str(value)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Strings, each once, in order; one string stands for itself alone."""
    listed = [value] if isinstance(value, str) else _listed(name, value, "strings")
    return tuple(dict.fromkeys(text(name, one) for one in listed))


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids from 0, each once, in order."""
    judge = integer(0, MAX_TOKEN_ID)
    return tuple(dict.fromkeys(judge(name, one) for one in _listed(name, value, "token ids")))


def _listed(name: str, value: Any, what: str) -> list[Any]:
    try:
        if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
            return list(value)
    except TypeError:  # an array without dimensions says that it is iterable
        pass
    raise RequestError(f"{name} must be a list of {what}, got {value!r:.80}")


def optional(judge: Judge) -> Judge:
    """None, or what the judge takes."""
    return lambda name, value: None if value is None else judge(name, value)


def or_empty(judge: Judge) -> Judge:
    """None is the empty list."""
    return lambda name, value: judge(name, () if value is None else value)


def record(kind: type[JudgedFields]) -> Judge:
    """An instance of `kind`, or a mapping of its fields; a copy, judged anew."""

    def judge(name: str, value: Any) -> JudgedFields:
        try:
            if isinstance(value, kind):
                return value.clone()
            if isinstance(value, Mapping):
                return kind(**{str(key): one for key, one in value.items()})
        except RequestError as error:
            raise RequestError(f"{name}: {error}") from None
        raise RequestError(f"{name} must be {kind.__name__}(...), got {value!r:.80}")

    return judge


def refused(neutral: Any, reason: str) -> Judge:
    """Takes only the value that asks for nothing."""

    def judge(name: str, value: Any) -> Any:
        is_empty = neutral is None and isinstance(value, str | list | tuple | dict) and not value
        if is_empty or value is neutral or (type(value) is type(neutral) and value == neutral):
            return neutral
        raise RequestError(f"{name} is refused (got {value!r:.80}): {reason}")

    return judge
