"""RMS normalization over the last axis, computed in float32."""

import jax.numpy as jnp
from jax import lax

from jpaged.typing import Array, Float


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
    sum_rows = _sum_as_product if row_invariant else _sum
    return x * lax.rsqrt(sum_rows(x * x) / x.shape[-1] + eps)


def _sum(x: Float[Array, "*rows D"]) -> Float[Array, "*rows 1"]:
    return jnp.sum(x, axis=-1, keepdims=True)


def _sum_as_product(x: Float[Array, "*rows D"]) -> Float[Array, "*rows 1"]:
    # The order in which XLA's CPU sums add up depends on how many rows there are. That of a product
    # does not, from two rows on; with one column it would be turned back into a sum.
    *rows, D = x.shape
    flat = jnp.pad(x.reshape(-1, D), ((0, 1), (0, 0)))
    sums = lax.dot(flat, jnp.ones((D, 2), x.dtype), precision=lax.Precision.HIGHEST)
    return sums[:-1, :1].reshape(*rows, 1)
