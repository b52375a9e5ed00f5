"""Weights as the native products read them: in panels of 32 outputs, each one stream of memory.

A panel is cut into steps of 32 inputs, which in a quantized weight share scales. Zeros fill the
last panel and the last step.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jpaged.native import matmul
from jpaged.native.matmul import PANEL
from jpaged.ops.activation import gate
from jpaged.ops.grouped import GROUP, GroupedWeight, numbers_by_group
from jpaged.ops.linear import add_linear, gated_linear, linear, linear_by_row
from jpaged.ops.rows import NormedRows, Rows, made
from jpaged.typing import Array, Float, Shaped

STEP = GROUP  # inputs

# Of a panel's inputs d and outputs c, those that stand side by side: [d/n][c][d%n].
TOGETHER = {"float32": 1, "float16": 1, "bfloat16": 2, "int8": 4, "uint8": 4}


@struct.dataclass
class PackedWeight:
    """Stands for a weight `[D F]`."""

    panels: Shaped[Array, "panels depth outputs together"]
    scales: Float[Array, "panels steps outputs"] | None
    leasts: Float[Array, "panels steps outputs"] | None
    kind: str = struct.field(pytree_node=False)  # a dtype, or int8 or int4
    num_out: int = struct.field(pytree_node=False)

    @property
    def dtype(self) -> Any:
        """That of the rows it multiplies; None: any."""
        return self.panels.dtype if self.scales is None else None


def pack(weight: Float[Array, "D F"] | GroupedWeight) -> PackedWeight:
    """A float weight, packed in its dtype, or a quantized one."""
    if not isinstance(weight, GroupedWeight):
        return PackedWeight(_panels(weight), None, None, weight.dtype.name, weight.shape[1])
    num_out = weight.numbers.shape[1]
    panels = _panels(numbers_by_group(weight).reshape(-1, num_out))
    scales = _by_panel(weight.scales)
    if weight.leasts is None:
        return PackedWeight(panels, scales, None, "int8", num_out)
    # Two neighbours of four inputs share their bytes.
    low, high = panels[:, 0::2], panels[:, 1::2]
    return PackedWeight(low | (high << 4), scales, _by_panel(weight.leasts), "int4", num_out)


def _panels(weight: Shaped[Array, "D F"]) -> Shaped[Array, "panels depth outputs together"]:
    D, F = weight.shape
    weight = jnp.pad(weight, ((0, -D % STEP), (0, -F % PANEL)))
    n = TOGETHER[weight.dtype.name]
    return weight.reshape(-1, n, weight.shape[1] // PANEL, PANEL).transpose(2, 0, 3, 1)


def _by_panel(x: Float[Array, "steps F"]) -> Float[Array, "panels steps outputs"]:
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % PANEL)))
    return x.reshape(x.shape[0], -1, PANEL).transpose(1, 0, 2)


def merge(slices: PackedWeight) -> PackedWeight:
    """Weights of the same inputs and whole panels, stacked along a new first axis, as one, outputs
    in order."""
    num_out = slices.num_out * slices.panels.shape[0]
    merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), slices)
    return replace(merged, num_out=num_out)


@linear.register
@linear_by_row.register
def _(weight: PackedWeight, x: Float[Array, "T D"], dtype: DTypeLike) -> Float[Array, "T F"]:
    return add_linear(weight, x, dtype)


@add_linear.register
def _(
    weight: PackedWeight,
    rows: Rows,
    dtype: DTypeLike,
    residual: Float[Array, "T F"] | None = None,
    *,
    row_invariant: bool = False,
) -> Float[Array, "T F"]:
    del row_invariant  # they are
    return _multiply(weight, rows, dtype, residual)


@gated_linear.register
def _(
    weight: PackedWeight,
    rows: Rows,
    dtype: DTypeLike,
    activation: str,
    *,
    row_invariant: bool = False,
) -> Float[Array, "T F"]:
    del row_invariant  # they are
    if activation in matmul.GATINGS and weight.num_out % (2 * PANEL) == 0:
        return _multiply(weight, rows, dtype, gating=activation)
    return gate(add_linear(weight, rows, dtype), activation)


def _multiply(
    weight: PackedWeight,
    rows: Rows,
    dtype: DTypeLike,
    residual: Float[Array, "T F"] | None = None,
    gating: str | None = None,
) -> Float[Array, "T F"]:
    x, making = _source(rows)
    return matmul.multiply(
        x,
        weight.panels,
        weight.scales,
        weight.leasts,
        residual,
        **making,
        gating=gating,
        kind=weight.kind,
        num_out=weight.num_out if gating is None else weight.num_out // 2,
        dtype=dtype,
    )


def _source(rows: Rows) -> tuple[Float[Array, "T D"], dict[str, Any]]:
    """What the product makes its rows of, and how."""
    if isinstance(rows, NormedRows) and rows.norm.weight.dtype == rows.dtype:
        making = "offset_rms_norm" if rows.norm.is_offset else "rms_norm"
        return rows.x, {"making": making, "norm": rows.norm.weight, "eps": rows.norm.eps}
    return made(rows), {}
