"""The MLP's activations, by the names of `ModelConfig.activation`."""

import functools as ft
from collections.abc import Callable

import jax

from jpaged.typing import Array, Float

ACTIVATIONS: dict[str, Callable[[Float[Array, "..."]], Float[Array, "..."]]] = {
    "silu": jax.nn.silu,
    "gelu": ft.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": ft.partial(jax.nn.gelu, approximate=True),
}
