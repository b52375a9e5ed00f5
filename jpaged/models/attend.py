"""Attention as a model sees it: a function given from outside, paged or dense.

A layer hands over its heads, and its KV if there is one; it gets the attended values and the KV
back. Which tokens see which is not its business, and neither is when heads are normalized and
turned: a kernel may do that while it writes them.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from jpaged.core.batch import Batch
from jpaged.ops.heads import Heads
from jpaged.ops.kv_cache import LayerKV, take_heads
from jpaged.ops.paged_attention import paged_attention
from jpaged.typing import Array, Bool, Float


@runtime_checkable
class AttendFn(Protocol):
    """(heads, kv) -> (attended values, kv)."""

    def __call__(
        self,
        heads: Heads,
        kv: LayerKV | None,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> tuple[Float[Array, "T H C"], LayerKV | None]:
        """Scores are multiplied by `scale`, then capped; a window counts the query's own token."""
        ...


def paged_attend(
    batch: Batch, *, deterministic: bool = False, implementation: str = "xla"
) -> AttendFn:
    """Attention over the pages of a step's rows: writes the step's tokens, then reads.

    deterministic, implementation: as in `paged_attention`.
    """

    def attend(
        heads: Heads,
        kv: LayerKV | None,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> tuple[Float[Array, "T H C"], LayerKV | None]:
        assert kv is not None, "a paged layer has KV"
        q, kv = take_heads(kv, heads, batch.slot_mapping)
        out = paged_attention(
            q,
            kv,
            block_table=batch.block_table,
            context_lens=batch.context_lens,
            query_start_loc=batch.query_start_loc,
            num_decode_rows=batch.num_decode_rows,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            deterministic=deterministic,
            implementation=implementation,
        )
        return out, kv

    return attend


def dense_attend(
    heads: Heads,
    kv: LayerKV | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "T H C"], LayerKV | None]:
    """Causal attention over one sequence, differentiable; `vmap` it for a batch.

    Padding on the right needs no mask: no earlier token sees it. `kv` is passed through.
    """
    q, k, v = heads.turned()
    T, H, C = q.shape
    K = k.shape[1]
    q = q.reshape(T, K, H // K, C)
    scores_KGTT = scale * _einsum("tkgc,pkc->kgtp", q, k)
    if soft_cap is not None:
        scores_KGTT = soft_cap * jnp.tanh(scores_KGTT / soft_cap)
    visible = _visible(T, window)[None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores_KGTT, -jnp.inf), axis=-1)
    out = _einsum("kgtp,pkc->tkgc", weights.astype(v.dtype), v)
    return out.astype(v.dtype).reshape(T, H, C), kv


def _visible(T: int, window: int | None) -> Bool[Array, "T T"]:
    """Whether the query of a row sees the key of a column."""
    distance = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
    return (distance >= 0) & (distance < (T if window is None else window))


def _einsum(spec: str, x: Array, y: Array) -> Array:
    return jnp.einsum(
        spec, x, y, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
