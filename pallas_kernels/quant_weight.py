"""A weight of 8 or 4 bits, in the one form that `quant_matmul` reads.

Owns `QuantWeight` and what its numbers stand for. `pallas_kernels.repack` makes it of what
checkpoints hold.
"""

import dataclasses
import functools as ft

import jax
import jax.numpy as jnp

from pallas_kernels import float8

RUN = 32  # inputs whose 4-bit numbers share 16 bytes
HALF = RUN // 2
ALIGNMENT = 16  # bytes that are loaded at once
MAX_BYTES = 2**31  # Pallas counts with 32 bits and a sign
INT4_MIDDLE = 8  # what 4-bit numbers without zeros and leasts are counted from
KINDS = ("int4", "int8", *float8.FORMATS)


@ft.partial(
    jax.tree_util.register_dataclass,
    data_fields=("numbers", "scales", "zeros", "leasts", "order"),
    meta_fields=("kind", "num_inputs", "inputs_per_scale", "outputs_per_scale"),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantWeight:
    """Stands for a weight [D F]. The number of input d and output f stands for

        (number - zero) * scale     or     number * scale + least

    with the scale in row d // inputs_per_scale and column f // outputs_per_scale, and the zero or
    least in that row and column f.

    numbers: [F stored], the D inputs of an output side by side, padded with anything finite to a
        multiple of 16 bytes. int8; or uint8, the bits of an 8-bit float; or, for int4, uint8 with
        two numbers of 0 to 15 in a byte: of each run of 32 inputs the low halves of 16 bytes hold
        the first 16, their high halves the others (so are GGUF's blocks).
    scales: float32, float16 or bfloat16.
    zeros: of the numbers' type, or None: 8 for int4, else 0. Not for 8-bit floats.
    leasts: of a float type, or None. Neither beside zeros nor for 8-bit floats.
    order: int32 [D], or None. The weight's input i goes with column order[i] of the rows.
    """

    numbers: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None
    leasts: jax.Array | None = None
    order: jax.Array | None = None
    kind: str
    num_inputs: int
    inputs_per_scale: int
    outputs_per_scale: int = 1

    @property
    def num_outputs(self) -> int:
        """F"""
        return self.numbers.shape[0]

    @property
    def stored_inputs(self) -> int:
        """D with its padding."""
        return self.numbers.shape[1] * (2 if self.kind == "int4" else 1)


def check(weight: QuantWeight) -> None:
    """That the arrays fit together as `QuantWeight` says.

    Raises:
        ValueError: they do not.
    """
    kind, D, F = weight.kind, weight.num_inputs, weight.num_outputs
    if kind not in KINDS:
        raise ValueError(f"{kind=} is unknown; choose one of {', '.join(KINDS)}")
    number_dtype = jnp.dtype(jnp.int8 if kind == "int8" else jnp.uint8)
    if weight.numbers.dtype != number_dtype or weight.numbers.ndim != 2:
        raise ValueError(
            f"{kind} numbers are {number_dtype} [F stored], these are {weight.numbers.dtype} "
            f"{weight.numbers.shape}"
        )
    step = RUN if kind == "int4" else ALIGNMENT
    if weight.stored_inputs < D or weight.stored_inputs % step:
        raise ValueError(
            f"numbers are stored of {weight.stored_inputs} inputs; {D} inputs need a multiple of "
            f"{step} that holds them: pad to {-(-D // step) * step}"
        )
    if weight.numbers.size > MAX_BYTES:
        raise ValueError(
            f"a weight of {weight.numbers.size} bytes cannot be addressed; cut it into parts of "
            f"{MAX_BYTES} or fewer"
        )
    rows = -(-D // weight.inputs_per_scale)
    _check_shape("scales", weight.scales, (rows, -(-F // weight.outputs_per_scale)))
    _check_shape("zeros", weight.zeros, (rows, F))
    _check_shape("leasts", weight.leasts, (rows, F))
    _check_shape("order", weight.order, (D,))
    if weight.zeros is not None and weight.zeros.dtype != number_dtype:
        raise ValueError(f"zeros of {kind} are {number_dtype}, these are {weight.zeros.dtype}")
    num_offsets = (weight.zeros is not None) + (weight.leasts is not None)
    if num_offsets > (kind not in float8.FORMATS):
        raise ValueError(
            f"{num_offsets} of zeros and leasts are given; {kind} numbers have "
            + ("none" if kind in float8.FORMATS else "one at most")
        )


def _check_shape(name: str, array: jax.Array | None, shape: tuple[int, ...]) -> None:
    if array is not None and array.shape != shape:
        raise ValueError(f"{name} of shape {array.shape} must be {shape}")


def pack_int4(numbers: jax.Array) -> jax.Array:
    """Numbers of 0 to 15, uint8 [F D], as bytes [F stored]; zeros fill the last run."""
    F = numbers.shape[0]
    runs = pad_inputs(numbers, RUN).reshape(F, -1, RUN)
    return (runs[..., :HALF] | (runs[..., HALF:] << 4)).reshape(F, -1)


def unpack_int4(packed: jax.Array) -> jax.Array:
    """The numbers 0 to 15 of bytes [F stored], uint8 [F 2*stored]."""
    F = packed.shape[0]
    runs = packed.reshape(F, -1, HALF)
    return jnp.concatenate([runs & 15, runs >> 4], axis=2).reshape(F, -1)


def pad_inputs(numbers: jax.Array, step: int = ALIGNMENT) -> jax.Array:
    """Numbers [F D] with zeros behind, up to a multiple of `step` inputs."""
    return jnp.pad(numbers, ((0, 0), (0, -numbers.shape[1] % step)))


def dequantize(weight: QuantWeight) -> jax.Array:
    """What the weight stands for, float32 [D F], inputs in the order of the rows' columns."""
    check(weight)
    row = jnp.arange(weight.num_inputs) // weight.inputs_per_scale
    column = jnp.arange(weight.num_outputs) // weight.outputs_per_scale
    values = _numbers(weight).T[: weight.num_inputs]
    if weight.zeros is not None:
        values -= weight.zeros[row].astype(jnp.float32)
    values *= weight.scales[row][:, column].astype(jnp.float32)
    if weight.leasts is not None:
        values += weight.leasts[row].astype(jnp.float32)
    return values if weight.order is None else jnp.zeros_like(values).at[weight.order].set(values)


def _numbers(weight: QuantWeight) -> jax.Array:
    """float32 [F stored], counted from the zero they have where none is given."""
    if weight.kind in float8.FORMATS:
        return float8.decode(weight.numbers, weight.kind, jnp.float32)
    if weight.kind == "int8":
        return weight.numbers.astype(jnp.float32)
    is_centred = weight.zeros is None and weight.leasts is None
    return unpack_int4(weight.numbers).astype(jnp.float32) - (INT4_MIDDLE if is_centred else 0)
