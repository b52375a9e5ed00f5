"""From the arrays of quantized checkpoints to `QuantWeight`: pure functions, exact.

Each takes the arrays of one linear as its format stores them (NumPy's or JAX's) and may run under
`jit`. Words of 32 bits hold small numbers side by side, the first in the lowest bits. Knows nothing
of files, and nothing of activations: a scale for these in a checkpoint is the caller's affair.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.quant_weight import QuantWeight, pack_int4, pad_inputs

INT8_MIDDLE = 128  # unsigned numbers of 8 bits are kept less this

# AWQ interleaves: the j-th of eight neighbouring outputs is number _AWQ_PLACE[j] of their word.
_AWQ_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)


def from_awq(qweight: Any, qzeros: Any | None, scales: Any, *, group_size: int) -> QuantWeight:
    """AWQ, version "gemm", 4 bits: (number - zero) * scale.

    Args:
        qweight: int32 [D F/8], packed along the outputs.
        qzeros: int32 [G F/8], packed alike; None: 8, as where the checkpoint says zero_point=false.
        scales: [G F].
        group_size: inputs with one scale; -1: all.
    """
    zeros = None if qzeros is None else _awq_numbers(qzeros)
    return _by_group(_awq_numbers(qweight).T, zeros, scales, bits=4, group_size=group_size)


def from_gptq(
    qweight: Any,
    qzeros: Any | None,
    scales: Any,
    g_idx: np.ndarray | None = None,
    *,
    bits: int,
    group_size: int,
    is_v2: bool = False,
) -> QuantWeight:
    """GPTQ: (number - zero) * scale.

    Args:
        qweight: int32 [D*bits/32 F], packed along the inputs.
        qzeros: int32 [G F*bits/32], packed along the outputs; None: the middle, as in checkpoints
            that say sym=true.
        scales: [G F].
        g_idx: int32 [D], the group of each input, on the host; None: neighbours are groups. Where
            they are not ("desc_act"), inputs are sorted by group and the rows of a product with
            them.
        bits: 2, 4 or 8; 2 are kept in 4.
        group_size: inputs with one scale; -1: all.
        is_v2: zeros are stored as they are ("gptq_v2"), not less one.

    Raises:
        ValueError: other bits, or groups of another size than `group_size`.
    """
    if bits not in (2, 4, 8):
        raise ValueError(f"GPTQ of {bits=} is not supported; 2, 4 and 8 are")
    numbers = _fields(jnp.asarray(qweight).T, bits)
    zeros = None
    if qzeros is not None:
        words = _as_words(qzeros)
        if not is_v2:
            # The writer took 1 from every field by one subtraction, which borrows across fields.
            words += jnp.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        zeros = _fields(words, bits)
    elif bits == 2:
        zeros = jnp.full(scales.shape, 2, jnp.uint8)
    order = None if g_idx is None else _order_of(g_idx, group_size)
    if order is not None:
        numbers = numbers[:, order]
    return _by_group(numbers, zeros, scales, bits=bits, group_size=group_size, order=order)


def from_pack_quantized(
    packed: Any,
    scales: Any,
    zero_points: Any | None = None,
    g_idx: np.ndarray | None = None,
    *,
    num_inputs: int,
    bits: int,
    group_size: int,
) -> QuantWeight:
    """compressed-tensors' "pack-quantized": (number - zero) * scale.

    Args:
        packed: int32 [F D*bits/32], packed along the inputs, numbers plus half their range.
        scales: [F G].
        zero_points: int32 [F*bits/32 G], packed along the outputs alike, or None: 0.
        g_idx: as in `from_gptq`.
        num_inputs: D, the second number in `weight_shape`.
        bits: 4 or 8.
        group_size: inputs with one scale; -1: all.

    Raises:
        ValueError: other bits, or groups of another size than `group_size`.
    """
    if bits not in (4, 8):
        raise ValueError(f"pack-quantized weights of {bits=} are not supported; 4 and 8 are")
    numbers = _fields(packed, bits)[:, :num_inputs]
    zeros = None
    if zero_points is not None:
        zeros = _fields(jnp.asarray(zero_points).T, bits)[:, : numbers.shape[0]]
    order = None if g_idx is None else _order_of(g_idx, group_size)
    if order is not None:
        numbers = numbers[:, order]
    scales = jnp.asarray(scales).T
    return _by_group(numbers, zeros, scales, bits=bits, group_size=group_size, order=order)


def from_int8(numbers: Any, scales: Any) -> QuantWeight:
    """int8 [F D] with scales [F G], G groups of neighbouring inputs: one, or as many as divide D.

    Raises:
        ValueError: D inputs are not G groups of one size.
    """
    numbers, scales = jnp.asarray(numbers), jnp.asarray(scales)
    (_, D), G = numbers.shape, scales.shape[1]
    if D % G:
        raise ValueError(f"{D} inputs are not {G} groups of one size; give one scale per output")
    return QuantWeight(
        numbers=pad_inputs(numbers),
        scales=scales.T,
        kind="int8",
        num_inputs=D,
        inputs_per_scale=D // G,
    )


def from_float8(
    weight: Any, scales: Any, *, kind: str = "float8_e4m3fn", block: tuple[int, int] | None = None
) -> QuantWeight:
    """8-bit floats: number * scale.

    Args:
        weight: [F D] of that float type, or uint8 with its bits.
        scales: a scale for all, [] or [1]; for each output, [F] or [F 1]; or with `block` for each
            block, [F/block[0] D/block[1]], rounded up ("weight_scale_inv" multiplies too).
        kind: the float type.
        block: outputs and inputs with one scale.

    Raises:
        ValueError: scales of another shape.
    """
    weight, scales = jnp.asarray(weight), jnp.asarray(scales)
    bits = weight if weight.dtype == jnp.uint8 else lax.bitcast_convert_type(weight, jnp.uint8)
    F, D = bits.shape
    spans = (F, D) if scales.size == 1 and block is None else block or (1, D)
    shape = (-(-F // spans[0]), -(-D // spans[1]))
    if scales.size != shape[0] * shape[1]:
        raise ValueError(
            f"scales of shape {scales.shape} do not fit a weight {bits.shape} with {block=}: "
            f"they must be one, one for each output, or {shape}"
        )
    return QuantWeight(
        numbers=pad_inputs(bits),
        scales=scales.reshape(shape).T.astype(jnp.float32),
        kind=kind,
        num_inputs=D,
        inputs_per_scale=spans[1],
        outputs_per_scale=spans[0],
    )


def from_gguf_groups(
    numbers: jax.Array, scales: jax.Array, leasts: jax.Array | None
) -> QuantWeight:
    """Groups of 32 inputs as in GGUF: number * scale + least, or number * scale.

    Args:
        numbers: int8 [F D], or with leasts uint8 [F D/2] with two numbers of 0 to 15 in a byte: a
            group's input d in the low half of byte d, its input d + 16 in the high half.
        scales: [G F], for D = 32 G inputs.
        leasts: [G F] or None.
    """
    group = 32
    return QuantWeight(
        numbers=numbers,
        scales=scales,
        leasts=leasts,
        kind="int8" if leasts is None else "int4",
        num_inputs=scales.shape[0] * group,
        inputs_per_scale=group,
    )


def _by_group(
    numbers: jax.Array,
    zeros: jax.Array | None,
    scales: Any,
    *,
    bits: int,
    group_size: int,
    order: np.ndarray | None = None,
) -> QuantWeight:
    """Of unsigned numbers [F D], zeros [G F] and scales [G F]."""
    D = numbers.shape[1]
    if bits == 8:
        numbers = _less_middle(numbers)
        zeros = None if zeros is None else _less_middle(zeros)
    return QuantWeight(
        numbers=pad_inputs(numbers) if bits == 8 else pack_int4(numbers),
        scales=jnp.asarray(scales),
        zeros=zeros,
        order=None if order is None else jnp.asarray(order, jnp.int32),
        kind="int8" if bits == 8 else "int4",
        num_inputs=D,
        inputs_per_scale=D if group_size == -1 else group_size,
    )


def _less_middle(numbers: jax.Array) -> jax.Array:
    """uint8 less 128, as int8."""
    return lax.bitcast_convert_type(numbers ^ INT8_MIDDLE, jnp.int8)


def _order_of(g_idx: np.ndarray, group_size: int) -> np.ndarray | None:
    """The inputs sorted by their group, int32 [D]; None if they are."""
    g_idx = np.asarray(g_idx)
    D = len(g_idx)
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    size = D if group_size == -1 else group_size
    if not np.array_equal(g_idx[order], np.arange(D) // size):
        raise ValueError(
            f"g_idx does not put {D} inputs into groups of {size}: its groups have "
            f"{np.unique(np.bincount(g_idx)).tolist()}; pass the checkpoint's group_size"
        )
    return None if np.array_equal(order, np.arange(D)) else order


def _awq_numbers(words: Any) -> jax.Array:
    """uint8 [rows F] of int32 [rows F/8]."""
    fields = _fields(words, 4)
    eights = fields.reshape(fields.shape[0], -1, 8)[:, :, np.array(_AWQ_PLACE)]
    return eights.reshape(fields.shape)


def _fields(words: Any, bits: int) -> jax.Array:
    """The numbers of `bits` each in words [rows columns], uint8 [rows columns*32/bits]."""
    words = _as_words(words)
    shifts = jnp.arange(0, 32, bits, dtype=jnp.uint32)
    fields = (words[:, :, None] >> shifts[None, None, :]) & ((1 << bits) - 1)
    return fields.astype(jnp.uint8).reshape(words.shape[0], -1)


def _as_words(x: Any) -> jax.Array:
    """int32 or uint32 as uint32: shifted, an int32 would bring copies of its sign."""
    return lax.bitcast_convert_type(jnp.asarray(x), jnp.uint32)
