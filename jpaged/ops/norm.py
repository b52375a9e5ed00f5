"""RMS normalization over the last axis, computed in float32."""

import jax.numpy as jnp
from jax import lax

from jpaged.typing import Array, Float


def rms_norm(
    x: Float[Array, "*rows D"], weight: Float[Array, " D"], *, eps: float
) -> Float[Array, "*rows D"]:
    """x scaled to a mean square of one and rounded to its dtype, then times weight."""
    return _normalize(x, eps).astype(x.dtype) * jnp.broadcast_to(weight, x.shape)


def offset_rms_norm(
    x: Float[Array, "*rows D"], weight: Float[Array, " D"], *, eps: float
) -> Float[Array, "*rows D"]:
    """Gemma's form: times 1 + weight, rounded only after the product."""
    scale = jnp.broadcast_to(1.0 + weight.astype(jnp.float32), x.shape)
    return (_normalize(x, eps) * scale).astype(x.dtype)


def _normalize(x: Float[Array, "*rows D"], eps: float) -> Float[Array, "*rows D"]:
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
