"""From the canonical tree of parameters to the one the engine runs.

Pure and jittable, as a whole or part by part. What serving wants and training does not: the
projections of one input fused into one product, matrices as `[in, out]`, an LM head of its own for
tied models, the serving dtype, numbers of 8 or 4 bits.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.model_config import ModelConfig
from jpaged.ops import grouped, kernel_linear, packed
from jpaged.ops.grouped import (
    Bits,
    GroupedRows,
    GroupedWeight,
    dequantize,
    join,
    quantize,
    transpose,
)
from jpaged.ops.packed import PANEL, pack
from jpaged.typing import Array, Float, Params, Shaped

FUSED = {
    "self_attn": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)},
    "mlp": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
}

# What becomes of a `GroupedWeight`, and of slices of its outputs that became so.
_LAYOUTS: dict[str, tuple[Callable[[GroupedWeight], Any], Callable[[Any], Any]]] = {
    "xla": (lambda weight: weight, grouped.merge),
    "native": (pack, packed.merge),
    "pallas": (kernel_linear.for_kernels, kernel_linear.merge),
}

SLICE = 1024  # outputs of a matrix that are laid out together


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingFormat:
    """How weights are served.

    dtype: of all but the matrices that are quantized.
    head_dtype: of the LM head, which then is not quantized; None: as every other matrix.
    implementation: of the products; "native" packs their matrices, and "pallas" lays quantized ones
        out, as no other can read them.
    bits: of the matrices' numbers; None leaves them in `dtype`.
    """

    dtype: str
    head_dtype: str | None = None
    implementation: str = "xla"
    bits: Bits | None = None

    @classmethod
    def of(cls, config: EngineConfig, dtype: str) -> "ServingFormat":
        """That of an engine which runs in `dtype`. config: resolved."""
        quantization = config.quantization
        return cls(
            dtype=dtype,
            head_dtype=None if config.head_dtype == "auto" else config.head_dtype,
            implementation=config.implementation,
            # What a file has in other blocks gets eight bits, which lose next to nothing of it.
            bits="int8" if quantization == "gguf" else quantization,
        )

    @property
    def head_bits(self) -> Bits | None:
        """Of the LM head's numbers: 8 with int4 too, for what is lost there is lost in logits."""
        return "int8" if self.bits and self.head_dtype is None else None


def prepare(
    params: Params,
    config: ModelConfig,
    dtype: DTypeLike,
    head_dtype: DTypeLike | None = None,
    *,
    implementation: str = "xla",
    quantization: str | None = None,
) -> dict[str, Any]:
    """The serving tree of `params`, which are left as they are.

    head_dtype: of the LM head alone, if it is not `dtype`; a head with a dtype of its own is not
        quantized.
    implementation: of the products, see `ServingFormat`.
    quantization: int8 or int4 makes the matrices numbers of so many bits, in groups of 32 inputs,
        from the precision that `params` have; biases, norms and the embedding table stay floats,
        and the LM head has 8 bits with int4 too.

    Raises ConfigError if the quantization is unknown.
    """
    if quantization not in (None, *get_args(Bits)):
        choices = " or ".join(get_args(Bits))
        raise ConfigError(f"quantization={quantization!r} is unknown; choose {choices}")
    form = ServingFormat(
        dtype=jnp.dtype(dtype).name,
        head_dtype=None if head_dtype is None else jnp.dtype(head_dtype).name,
        implementation=implementation,
        bits=cast(Bits | None, quantization),
    )
    ends, layers = split_layers(params)
    prepared = {i: prepare_layer(layer, form) for i, layer in layers.items()}
    return join_layers(prepare_ends(ends, form, tied=config.tied), prepared)


def param_bytes(params: Params) -> int:
    """Bytes of a tree of parameters, real or abstract."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(params))


# --- parts ---


def split_layers(params: Params) -> tuple[dict[str, Any], Mapping[int, Params]]:
    """A tree without its layers, and those."""
    decoder = params["model"]
    rest = {name: value for name, value in decoder.items() if name != "layers"}
    return {**params, "model": rest}, decoder["layers"]


def join_layers(ends: Params, layers: Mapping[int, Params]) -> dict[str, Any]:
    """The tree that `split_layers` took apart."""
    return {**ends, "model": {**ends["model"], "layers": dict(layers)}}


def prepare_layer(layer: Params, form: ServingFormat) -> dict[str, Any]:
    """A layer of the serving tree."""
    blocks = {name: _fuse_block(layer[name], table, form) for name, table in FUSED.items()}
    return {**_cast(layer, FUSED, form.dtype), **blocks}


def prepare_ends(ends: Params, form: ServingFormat, *, tied: bool) -> dict[str, Any]:
    """All but the layers: the table, the last norm, and the LM head."""
    decoder = ends["model"]
    table = decoder["embed_tokens"]
    dtype = form.head_dtype or form.dtype
    return {
        "model": {
            **_cast(decoder, ("embed_tokens",), form.dtype),
            "embed_tokens": {"weight": _table(table["weight"], form.dtype)},
        },
        "lm_head": _fuse([table if tied else ends["lm_head"]], form, dtype, form.head_bits),
    }


def _cast(tree: Params, but: Collection[str], dtype: DTypeLike) -> dict[str, Any]:
    rest = {name: value for name, value in tree.items() if name not in but}
    return jax.tree.map(lambda x: x.astype(dtype), rest)


def _table(weight: Any, dtype: DTypeLike) -> Array:
    table = _floats(weight, dtype)
    # A CPU would convert a 16-bit table to float32 as a whole each time it reads a row.
    return _as_bits(table) if table.dtype.itemsize == 2 else table


# --- matrices ---


def _fuse_block(
    block: Params, table: Mapping[str, tuple[str, ...]], form: ServingFormat
) -> dict[str, Any]:
    fused = {
        new: _fuse([block[part] for part in old], form, form.dtype, form.bits)
        for new, old in table.items()
    }
    parts = {part for old in table.values() for part in old}
    return {**_cast(block, parts, form.dtype), **fused}


def _fuse(
    parts: Sequence[Params], form: ServingFormat, dtype: DTypeLike, bits: Bits | None
) -> dict[str, Any]:
    """Linears of one input, `[out, in]`, as one `[in, out]`, its outputs in their order."""
    rows = _join([part["weight"] for part in parts], dtype, bits)
    fused: dict[str, Any] = {"weight": _lay_out(rows, bits, form.implementation)}
    if "bias" in parts[0]:
        fused["bias"] = jnp.concatenate([part["bias"].astype(dtype) for part in parts])
    return fused


def _join(weights: Sequence[Any], dtype: DTypeLike, bits: Bits | None) -> Any:
    """Weights `[F D]` as one: floats of `dtype` or, with `bits`, of their own precision. What has
    numbers keeps them then, if all are of one kind."""
    if bits is None:
        return jnp.concatenate([_floats(weight, dtype) for weight in weights])
    stored = [weight for weight in weights if isinstance(weight, GroupedRows)]
    if len(stored) == len(weights) and (joined := join(stored)) is not None:
        return joined
    dtypes = {jnp.float32 if isinstance(w, GroupedRows) else w.dtype.type for w in weights}
    own = dtypes.pop() if len(dtypes) == 1 else jnp.float32
    return jnp.concatenate([_floats(weight, own) for weight in weights])


def _floats(weight: Any, dtype: DTypeLike) -> Float[Array, "F D"]:
    is_grouped = isinstance(weight, GroupedRows)
    return dequantize(transpose(weight), dtype).T if is_grouped else weight.astype(dtype)


def _lay_out(rows: Any, bits: Bits | None, implementation: str) -> Any:
    """A weight `[F D]` as the products want it."""
    if bits is None:
        return pack(rows.T) if implementation == "native" else rows.T
    make = transpose if isinstance(rows, GroupedRows) else ft.partial(_quantize, rows.dtype, bits)
    if not isinstance(rows, GroupedRows) and rows.dtype.itemsize == 2:
        # A CPU would widen 16-bit floats as a whole before it takes a slice.
        rows = _as_bits(rows)

    finish, merge = _LAYOUTS[implementation]

    # Slice by slice, which is faster and leaves nothing as large as the whole beside it.
    num_slices = _num_slices(len(jax.tree.leaves(rows)[0]))
    slices = jax.tree.map(lambda x: x.reshape(num_slices, -1, x.shape[1]), rows)
    return merge(lax.map(lambda rows: finish(make(rows)), slices))


def _quantize(dtype: DTypeLike, bits: Bits, rows: Shaped[Array, "F D"]) -> GroupedWeight:
    """rows: floats of a dtype, or their bits."""
    return quantize(lax.bitcast_convert_type(rows, dtype).T, bits)


def _as_bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint16)


def _num_slices(num_out: int) -> int:
    """The most slices of equal whole panels, SLICE outputs at least."""
    panels, rest = divmod(num_out, PANEL)
    most = max(num_out // SLICE, 1) if rest == 0 else 1
    return max(n for n in range(1, most + 1) if rest or panels % n == 0)
