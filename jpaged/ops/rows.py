"""What a product's rows are made of, for products that make them as they read them.

Products in C++ do; for all others `made` gives the rows themselves. Both round alike.
"""

import jax
import jax.numpy as jnp
from flax import struct

from jpaged.ops.activation import ACTIVATIONS
from jpaged.ops.norm import offset_rms_norm, rms_norm
from jpaged.typing import Array, Float


@struct.dataclass
class NormedRows:
    """RMS norms of the rows of x, in Llama's form or, with `is_offset`, in Gemma's."""

    x: Float[Array, "*rows D"]
    weight: Float[Array, " D"]
    eps: float = struct.field(pytree_node=False)
    is_offset: bool = struct.field(pytree_node=False)
    row_invariant: bool = struct.field(pytree_node=False)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the rows."""
        return self.x.dtype

    def __len__(self) -> int:
        return len(self.x)


@struct.dataclass
class GatedRows:
    """activation(gate) * up of rows of D gates and D ups."""

    gate_up: Float[Array, "T 2*D"]
    activation: str = struct.field(pytree_node=False)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the rows."""
        return self.gate_up.dtype

    def __len__(self) -> int:
        return len(self.gate_up)


Rows = jax.Array | NormedRows | GatedRows


def made(rows: Rows) -> Float[Array, "*rows D"]:
    """The rows themselves, in the dtype of what they are made of."""
    if isinstance(rows, NormedRows):
        norm = offset_rms_norm if rows.is_offset else rms_norm
        return norm(rows.x, rows.weight, eps=rows.eps, row_invariant=rows.row_invariant)
    if isinstance(rows, GatedRows):
        gate, up = jnp.split(rows.gate_up, 2, axis=-1)
        return ACTIVATIONS[rows.activation](gate) * up
    return rows
