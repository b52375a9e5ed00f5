"""The MLP's activations, by the names of `ModelConfig.activation`."""

import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jpaged.typing import Array, Float

ACTIVATIONS: dict[str, Callable[[Float[Array, "..."]], Float[Array, "..."]]] = {
    "silu": jax.nn.silu,
    "gelu": ft.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": ft.partial(jax.nn.gelu, approximate=True),
}


def gate(gate_up: Float[Array, "T gates_and_ups"], activation: str) -> Float[Array, "T F"]:
    """activation(gate) * up of rows of F gates and F ups."""
    gates, ups = jnp.split(gate_up, 2, axis=-1)
    return ACTIVATIONS[activation](gates) * ups
