"""What a product's rows are made of, for products that make them as they read them.

Products in C++ do; for all others `made` gives the rows themselves. Both round alike.
"""

import jax
import jax.numpy as jnp
from flax import struct

from jpaged.ops.norm import RMSNorm
from jpaged.typing import Array, Float


@struct.dataclass
class NormedRows:
    """The rows of x, to be normalized."""

    x: Float[Array, "*rows D"]
    norm: RMSNorm

    @property
    def dtype(self) -> jnp.dtype:
        """Of the rows."""
        return self.x.dtype

    def __len__(self) -> int:
        return len(self.x)


Rows = jax.Array | NormedRows


def made(rows: Rows) -> Float[Array, "*rows D"]:
    """The rows themselves, in the dtype of what they are made of."""
    if isinstance(rows, NormedRows):
        return rows.norm(rows.x)
    return rows
