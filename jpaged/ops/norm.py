"""RMS normalization over the last axis, computed in float32."""

import jax.numpy as jnp
from flax import struct
from jax import lax

from jpaged.ops.invariant import sum_last
from jpaged.typing import Array, Float


@struct.dataclass
class RMSNorm:
    """A norm and its weight, in Llama's form or, with `is_offset`, in Gemma's."""

    weight: Float[Array, " D"]
    eps: float = struct.field(pytree_node=False)
    is_offset: bool = struct.field(pytree_node=False)
    row_invariant: bool = struct.field(pytree_node=False, default=False)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Over the last axis, in x's dtype."""
        norm = offset_rms_norm if self.is_offset else rms_norm
        return norm(x, self.weight, eps=self.eps, row_invariant=self.row_invariant)


def rms_norm(
    x: Float[Array, "*rows D"], weight: Float[Array, " D"], *, eps: float, row_invariant: bool
) -> Float[Array, "*rows D"]:
    """x scaled to a mean square of one and rounded to its dtype, then times weight.

    row_invariant: a row has the same bits among any number of others.
    """
    normalized = _normalize(x, eps, row_invariant=row_invariant)
    return normalized.astype(x.dtype) * jnp.broadcast_to(weight, x.shape)


def offset_rms_norm(
    x: Float[Array, "*rows D"], weight: Float[Array, " D"], *, eps: float, row_invariant: bool
) -> Float[Array, "*rows D"]:
    """Gemma's form: times 1 + weight, rounded only after the product."""
    scale = jnp.broadcast_to(1.0 + weight.astype(jnp.float32), x.shape)
    return (_normalize(x, eps, row_invariant=row_invariant) * scale).astype(x.dtype)


def _normalize(
    x: Float[Array, "*rows D"], eps: float, *, row_invariant: bool
) -> Float[Array, "*rows D"]:
    x = x.astype(jnp.float32)
    total = sum_last(x * x) if row_invariant else jnp.sum(x * x, axis=-1)
    return x * lax.rsqrt(total / x.shape[-1] + eps)[..., None]
