"""The rotary embedding of a layer: its settings, and their many names in Hugging Face configs."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from jpaged.errors import ConfigError, UnsupportedModelError

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]
HFConfig = Mapping[str, Any]

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a layer. `kind` selects which of the scaling fields matter."""

    theta: float
    kind: RopeKind = "default"
    rotary_dim: int  # of head_dim
    factor: float = 1.0  # all kinds but default
    original_max_position: int = 0  # dynamic, yarn, llama3: positions before scaling
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it
    beta_fast: float = 32.0  # yarn: rotations above which a dimension is left alone
    beta_slow: float = 1.0  # yarn: rotations below which it is fully interpolated
    truncate: bool = True  # yarn: round the two bounds to whole dimensions
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3


def require_int(hf: HFConfig, name: str) -> int:
    """A positive integer without which there is no model.

    Raises:
        ConfigError: it is missing, or something else.
    """
    value = _require(hf, name)
    if type(value) is not int or value <= 0:
        raise ConfigError(f"{name}={value!r} in config.json must be a positive integer")
    return value


def require_number(hf: HFConfig, name: str, at_least: float = 0.0) -> float:
    """A number without which there is no model.

    Raises:
        ConfigError: it is missing, too small, or no number.
    """
    value = _require(hf, name)
    if type(value) not in (int, float) or not value >= at_least:
        raise ConfigError(f"{name}={value!r} in config.json must be a number >= {at_least}")
    return float(value)


def _require(hf: HFConfig, name: str) -> Any:
    if hf.get(name) is None:
        raise ConfigError(f"config.json has no {name!r}; add it, or fetch the complete file")
    return hf[name]


def read_rope(hf: HFConfig, layer_type: str, head_dim: int) -> RopeConfig:
    """The rope of a layer type, from a `config.json` in either style.

    Raises:
        UnsupportedModelError: the kind of scaling is not implemented.
        ConfigError: a setting is missing, of a wrong value, or contradicts another one.
    """
    scaling = _rope_scaling(hf, layer_type)
    kind = _rope_kind(scaling)
    if (scaling.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor={scaling['partial_rotary_factor']} is not implemented; "
            "use a checkpoint that turns whole heads (1.0)"
        )
    return RopeConfig(
        theta=require_number(scaling, "rope_theta", 1.0),
        rotary_dim=head_dim,
        kind=kind,
        **_SCALINGS[kind](scaling, hf),
    )


def scaled_max_position(hf: HFConfig, head_dim: int) -> int:
    """The longest context that the rope of full attention is scaled for, as vLLM reads it.

    Linear and dynamic scaling stretch the config's own context, yarn the one it names as original;
    with llama3 the config's own is the stretched one.
    """
    own = require_int(hf, "max_position_embeddings")
    rope = read_rope(hf, "full_attention", head_dim)
    if rope.kind in ("linear", "dynamic"):
        return int(own * rope.factor)
    return max(own, int(rope.original_max_position * rope.factor)) if rope.kind == "yarn" else own


def _rope_scaling(hf: HFConfig, layer_type: str) -> dict[str, Any]:
    """The rope settings of a layer type in transformers 5's names, whichever style they came in."""
    is_local = layer_type == "sliding_attention" and hf.get("rope_local_base_freq") is not None
    if (parameters := hf.get("rope_parameters")) is not None:
        is_nested = any(isinstance(value, Mapping) for value in parameters.values())
        scaling = (parameters.get(layer_type) or {}) if is_nested else parameters
    else:  # Gemma 3 scales its global layers alone.
        scaling = {} if is_local else hf.get("rope_scaling") or {}
    settings = {
        "rope_theta": hf["rope_local_base_freq"] if is_local else hf.get("rope_theta"),
        "partial_rotary_factor": hf.get("partial_rotary_factor"),
    }
    return {**settings, **scaling}


def _rope_kind(scaling: HFConfig) -> RopeKind:
    kinds = {scaling[name] for name in ("rope_type", "type") if scaling.get(name) is not None}
    if len(kinds) > 1:
        raise ConfigError(f"rope settings name two kinds, {sorted(kinds)}; keep 'rope_type' alone")
    kind = kinds.pop() if kinds else "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"rope_type={kind!r} is not implemented; implemented are {', '.join(ROPE_KINDS)}"
        )
    return cast(RopeKind, kind)


def _original_max_position(scaling: HFConfig, hf: HFConfig) -> int:
    name = "original_max_position_embeddings"
    holder = next((x for x in (hf, scaling) if x.get(name) is not None), None)
    return (
        require_int(hf, "max_position_embeddings") if holder is None else require_int(holder, name)
    )


def _default(*_: HFConfig) -> dict[str, Any]:
    return {}


def _linear(scaling: HFConfig, *_: HFConfig) -> dict[str, Any]:
    return {"factor": require_number(scaling, "factor", 1.0)}


def _dynamic(scaling: HFConfig, hf: HFConfig) -> dict[str, Any]:
    # As in transformers, the scaling begins where the config's own context ends.
    return {
        "factor": require_number(scaling, "factor", 1.0),
        "original_max_position": require_int(hf, "max_position_embeddings"),
    }


def _llama3(scaling: HFConfig, hf: HFConfig) -> dict[str, Any]:
    low, high = (require_number(scaling, name) for name in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ConfigError(
            f"low_freq_factor={low} must be below high_freq_factor={high}: they bound one range"
        )
    return {
        "factor": require_number(scaling, "factor", 1.0),
        "original_max_position": _original_max_position(scaling, hf),
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def _yarn(scaling: HFConfig, hf: HFConfig) -> dict[str, Any]:
    original = _original_max_position(scaling, hf)
    if scaling.get("factor") is None:
        scaling = {**scaling, "factor": require_int(hf, "max_position_embeddings") / original}
    factor = require_number(scaling, "factor", 1.0)
    return {
        "factor": factor,
        "original_max_position": original,
        "attention_factor": _yarn_attention_factor(factor, scaling),
        "beta_fast": float(scaling.get("beta_fast") or 32.0),
        "beta_slow": float(scaling.get("beta_slow") or 1.0),
        "truncate": bool(scaling.get("truncate", True)),
    }


def _yarn_attention_factor(factor: float, scaling: HFConfig) -> float:
    if scaling.get("attention_factor") is not None:
        return require_number(scaling, "attention_factor")
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    growth = 0.1 * math.log(factor)
    if mscale and mscale_all_dim:
        return (mscale * growth + 1.0) / (mscale_all_dim * growth + 1.0)
    return growth + 1.0


_SCALINGS: dict[RopeKind, Callable[[HFConfig, HFConfig], dict[str, Any]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}
