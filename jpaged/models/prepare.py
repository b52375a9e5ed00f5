"""From the canonical tree of parameters to the one the engine runs.

Pure and jittable, as a whole or part by part. What serving wants and training does not: the
projections of one input fused into one product, matrices as `[in, out]`, an LM head of its own for
tied models, the serving dtype, numbers of 8 or 4 bits.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.model_config import ModelConfig
from jpaged.ops.grouped import Bits, GroupedRows, GroupedWeight, dequantize, join, quantize
from jpaged.ops.packed import pack
from jpaged.typing import Array, Float, Params

FUSED = {
    "self_attn": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)},
    "mlp": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingFormat:
    """How weights are served.

    dtype: of all but the matrices that are quantized.
    head_dtype: of the LM head, which then is not quantized; None: as every other matrix.
    implementation: of the products; "native" packs their matrices, which no other can read.
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
        """Of the LM head's numbers."""
        return self.bits if self.head_dtype is None else None


def prepare(
    params: Params,
    config: ModelConfig,
    dtype: DTypeLike,
    head_dtype: DTypeLike | None = None,
    *,
    implementation: str = "xla",
    quantization: Bits | None = None,
) -> dict[str, Any]:
    """The serving tree of `params`, which are left as they are.

    head_dtype: of the LM head alone, if it is not `dtype`; a head with a dtype of its own is not
        quantized.
    implementation: of the products; "native" packs their matrices, which no other can read.
    quantization: int8 or int4 makes the matrices numbers of so many bits, in groups of 32 inputs,
        from the precision that `params` have; biases, norms and the embedding table stay floats.

    Raises ConfigError if the quantization is unknown.
    """
    if quantization not in (None, *get_args(Bits)):
        choices = " or ".join(get_args(Bits))
        raise ConfigError(f"quantization={quantization!r} is unknown; choose {choices}")
    form = ServingFormat(
        dtype=jnp.dtype(dtype).name,
        head_dtype=None if head_dtype is None else jnp.dtype(head_dtype).name,
        implementation=implementation,
        bits=quantization,
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
    return lax.bitcast_convert_type(table, jnp.uint16) if table.dtype.itemsize == 2 else table


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
    weight = _join([part["weight"] for part in parts], dtype, bits)
    fused: dict[str, Any] = {"weight": pack(weight) if form.implementation == "native" else weight}
    if "bias" in parts[0]:
        fused["bias"] = jnp.concatenate([part["bias"].astype(dtype) for part in parts])
    return fused


def _join(
    weights: Sequence[Any], dtype: DTypeLike, bits: Bits | None
) -> Float[Array, "D F"] | GroupedWeight:
    """Weights `[F D]` as one `[D F]`: floats of `dtype` or, with `bits`, numbers. What has numbers
    keeps them, if all are of one kind."""
    if bits is None:
        return jnp.concatenate([_floats(weight, dtype) for weight in weights]).T
    stored = [weight for weight in weights if isinstance(weight, GroupedRows)]
    if len(stored) == len(weights) and (joined := join(stored)) is not None:
        return joined
    return quantize(jnp.concatenate([_floats(w, jnp.float32) for w in weights]).T, bits)


def _floats(weight: Any, dtype: DTypeLike) -> Float[Array, "F D"]:
    if not isinstance(weight, GroupedRows):
        return weight.astype(dtype)
    joined = join([weight])
    assert joined is not None
    return dequantize(joined, dtype).T
