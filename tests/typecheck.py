"""The run-time type checker of the import hook: functions are checked, constructors are not."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

CONFIG = BeartypeConf(is_pep484_tower=True)  # an int will do for a float


def check(fn: Callable[..., Any]) -> Callable[..., Any]:
    # JAX rebuilds state types around specs, shapes and placeholders: what a field holds is checked
    # where it is used.
    return fn if fn.__name__ == "__init__" else beartype(fn, conf=CONFIG)
