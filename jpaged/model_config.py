"""What a model is: every field resolved, foreign names ended here.

`ModelConfig.from_hf` is the only place that reads a Hugging Face config, in the style of
transformers 5 (`rope_parameters`, `dtype`) or 4 (`rope_theta`, `rope_scaling`, `torch_dtype`). After
it every field has a value, and per-layer differences are data in `layers`, not subclasses.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast

from jpaged.errors import ConfigError, UnsupportedModelError

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
HFConfig = Mapping[str, Any]

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What differs between layers: the attention window (None: full) and the rope (None: no rope).

    A token attends to itself and to the `window - 1` tokens before it.
    """

    window: int | None
    rope: RopeConfig | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family (Llama, Mistral, Qwen2/3, Gemma 2/3)."""

    architecture: str  # Hugging Face's class name, e.g. LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    layers: tuple[LayerConfig, ...]
    dtype: str  # the checkpoint's: float32, bfloat16, float16
    rms_norm_eps: float
    activation: Activation
    tied: bool  # the LM head is the embedding
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head before the rope
    post_norms: bool = False  # norms after attention and MLP as well as before (Gemma 2, 3)
    norm_offset: bool = False  # norms multiply by 1 + weight, in float32 (Gemma)
    embedding_scale: float | None = None
    attention_scale: float
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if type(value) is not int or value <= 0:
                raise ConfigError(f"{name}={value!r} must be a positive integer")
        if not self.layers:
            raise ConfigError("layers=() is empty: a model needs at least one layer")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads="
                f"{self.num_kv_heads}: each KV head serves the same number of query heads"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        for layer in self.layers:
            _check_layer(layer, self.head_dim)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def from_hf(cls, hf: HFConfig) -> "ModelConfig":
        """Reads a Hugging Face `config.json`, given as the dict it parses to.

        Raises:
            UnsupportedModelError: the architecture, or a setting of it, is not implemented.
            ConfigError: a field is missing, of a wrong value, or contradicts another one.
        """
        architecture = _architecture(hf)
        family = _FAMILIES[architecture]
        hf = {**family.defaults, **hf}
        _refuse_unimplemented(hf)
        return cls(architecture=architecture, **_common(hf), **family.read(hf))


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position",
)


def _check_layer(layer: LayerConfig, head_dim: int) -> None:
    if layer.window is not None and layer.window <= 0:
        raise ConfigError(f"window={layer.window} must be positive, or None for full attention")
    if layer.rope is None:
        return
    rotary_dim = layer.rope.rotary_dim
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ConfigError(
            f"rotary_dim={rotary_dim} must be even and at most {head_dim=}: rope turns pairs"
        )


# ---- Fields that all families share ----


def _architecture(hf: HFConfig) -> str:
    names = hf.get("architectures") or ()
    for name in names:
        if name in _FAMILIES:
            return name
    raise UnsupportedModelError(
        f"architectures={list(names)} in config.json is not supported; "
        f"supported are {', '.join(sorted(_FAMILIES))}"
    )


def _require(hf: HFConfig, name: str) -> Any:
    if hf.get(name) is None:
        raise ConfigError(f"config.json has no {name!r}; add it, or fetch the complete file")
    return hf[name]


def _common(hf: HFConfig) -> dict[str, Any]:
    num_heads = _require(hf, "num_attention_heads")
    head_dim = _head_dim(hf)
    return {
        "vocab_size": _require(hf, "vocab_size"),
        "hidden_size": _require(hf, "hidden_size"),
        "intermediate_size": _require(hf, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_heads if (n := hf.get("num_key_value_heads")) is None else n,
        "head_dim": head_dim,
        "max_position": _require(hf, "max_position_embeddings"),
        "dtype": _dtype(hf),
        "rms_norm_eps": float(_require(hf, "rms_norm_eps")),
        "activation": _activation(hf),
        "tied": bool(hf.get("tie_word_embeddings")),
        "attention_scale": float(hf.get("query_pre_attn_scalar") or head_dim) ** -0.5,
    }


def _head_dim(hf: HFConfig) -> int:
    if (head_dim := hf.get("head_dim")) is not None:
        return head_dim
    hidden_size, num_heads = hf["hidden_size"], hf["num_attention_heads"]
    if hidden_size % num_heads:
        raise ConfigError(
            f"{hidden_size=} is not a multiple of num_attention_heads={num_heads}, "
            "and config.json has no head_dim to say how wide a head is"
        )
    return hidden_size // num_heads


def _dtype(hf: HFConfig) -> str:
    return str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")


def _activation(hf: HFConfig) -> Activation:
    # Gemma's `hidden_act` is a leftover; `hidden_activation` is what the model was trained with.
    name = hf.get("hidden_activation") or hf.get("hidden_act")
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"hidden_act={name!r} is not implemented; implemented are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _refuse_unimplemented(hf: HFConfig) -> None:
    """`pretraining_tp`, dropout and initializers change no logits, and so are not read."""
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "use_bidirectional_attention=true is not implemented: jpaged generates with causal "
            "attention; use the causal checkpoint of this model"
        )


# ---- Layers: windows and rope ----


def _layers(hf: HFConfig, layer_types: list[str]) -> tuple[LayerConfig, ...]:
    """`layer_types` of the config wins over those that the family's own rule gives."""
    num_layers = _require(hf, "num_hidden_layers")
    layer_types = hf.get("layer_types") or layer_types
    if len(layer_types) != num_layers:
        raise ConfigError(
            f"layer_types has {len(layer_types)} entries for num_hidden_layers={num_layers}"
        )
    layer_of_type = {layer_type: _layer(hf, layer_type) for layer_type in set(layer_types)}
    return tuple(layer_of_type[layer_type] for layer_type in layer_types)


def _layer(hf: HFConfig, layer_type: str) -> LayerConfig:
    if layer_type == "full_attention":
        return LayerConfig(window=None, rope=_rope(hf, layer_type))
    if layer_type != "sliding_attention":
        raise UnsupportedModelError(
            f"layer_types has {layer_type!r}; implemented are full_attention, sliding_attention"
        )
    return LayerConfig(window=_require(hf, "sliding_window"), rope=_rope(hf, layer_type))


def _alternate(hf: HFConfig, is_sliding: Callable[[int], bool]) -> list[str]:
    num_layers = _require(hf, "num_hidden_layers")
    return ["sliding_attention" if is_sliding(i) else "full_attention" for i in range(num_layers)]


def _rope(hf: HFConfig, layer_type: str) -> RopeConfig:
    scaling = _rope_scaling(hf, layer_type)
    kind = _rope_kind(scaling)
    if (scaling.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModelError(
            f"partial_rotary_factor={scaling['partial_rotary_factor']} is not implemented for "
            f"{_architecture(hf)}; only 1.0 is"
        )
    return RopeConfig(
        theta=float(_require(scaling, "rope_theta")),
        rotary_dim=_head_dim(hf),
        kind=kind,
        **_SCALINGS[kind](hf, scaling),
    )


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


def _rope_kind(scaling: Mapping[str, Any]) -> RopeKind:
    kinds = {scaling[name] for name in ("rope_type", "type") if scaling.get(name) is not None}
    if len(kinds) > 1:
        raise ConfigError(f"rope settings name two kinds, {sorted(kinds)}; keep 'rope_type' alone")
    kind = kinds.pop() if kinds else "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(
            f"rope_type={kind!r} is not implemented; implemented are {', '.join(ROPE_KINDS)}"
        )
    return cast(RopeKind, kind)


def _number(scaling: Mapping[str, Any], name: str, at_least: float = 0.0) -> float:
    value = scaling.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < at_least:
        raise ConfigError(f"rope scaling needs {name}, a number >= {at_least}; it has {value!r}")
    return float(value)


def _original_max_position(hf: HFConfig, scaling: Mapping[str, Any]) -> int:
    name = "original_max_position_embeddings"
    return hf.get(name) or scaling.get(name) or _require(hf, "max_position_embeddings")


def _linear(hf: HFConfig, scaling: Mapping[str, Any]) -> dict[str, Any]:
    return {"factor": _number(scaling, "factor", 1.0)}


def _dynamic(hf: HFConfig, scaling: Mapping[str, Any]) -> dict[str, Any]:
    # As in transformers, the scaling begins where the config's own context ends.
    return {
        "factor": _number(scaling, "factor", 1.0),
        "original_max_position": _require(hf, "max_position_embeddings"),
    }


def _llama3(hf: HFConfig, scaling: Mapping[str, Any]) -> dict[str, Any]:
    low, high = (_number(scaling, name) for name in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ConfigError(
            f"low_freq_factor={low} must be below high_freq_factor={high}: they bound one range"
        )
    return {
        "factor": _number(scaling, "factor", 1.0),
        "original_max_position": _original_max_position(hf, scaling),
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def _yarn(hf: HFConfig, scaling: Mapping[str, Any]) -> dict[str, Any]:
    original = _original_max_position(hf, scaling)
    if scaling.get("factor") is None:
        scaling = {**scaling, "factor": _require(hf, "max_position_embeddings") / original}
    factor = _number(scaling, "factor", 1.0)
    return {
        "factor": factor,
        "original_max_position": original,
        "attention_factor": _yarn_attention_factor(factor, scaling),
        "beta_fast": float(scaling.get("beta_fast") or 32.0),
        "beta_slow": float(scaling.get("beta_slow") or 1.0),
        "truncate": bool(scaling.get("truncate", True)),
    }


def _yarn_attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    growth = 0.1 * math.log(factor)
    if mscale and mscale_all_dim:
        return (mscale * growth + 1.0) / (mscale_all_dim * growth + 1.0)
    return growth + 1.0


_SCALINGS: dict[RopeKind, Callable[[HFConfig, Mapping[str, Any]], dict[str, Any]]] = {
    "default": lambda hf, scaling: {},
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}


# ---- Families ----


def _llama(hf: HFConfig) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias"))
    return {
        "layers": _layers({**hf, "layer_types": None}, _alternate(hf, lambda i: False)),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(hf.get("mlp_bias")),
    }


def _mistral(hf: HFConfig) -> dict[str, Any]:
    has_window = hf["sliding_window"] is not None
    return {"layers": _layers(hf, _alternate(hf, lambda i: has_window))}


def _qwen_layers(hf: HFConfig) -> tuple[LayerConfig, ...]:
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    first = hf["max_window_layers"] if window is not None else math.inf
    return _layers({**hf, "sliding_window": window}, _alternate(hf, lambda i: i >= first))


def _qwen2(hf: HFConfig) -> dict[str, Any]:
    return {"layers": _qwen_layers(hf), "qkv_bias": True}


def _qwen3(hf: HFConfig) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias"))
    return {"layers": _qwen_layers(hf), "qkv_bias": bias, "o_bias": bias, "qk_norm": True}


def _gemma(hf: HFConfig, period: int) -> dict[str, Any]:
    """Every `period`-th layer is global, the others slide."""
    bias = bool(hf.get("attention_bias"))
    return {
        "layers": _layers(hf, _alternate(hf, lambda i: bool((i + 1) % period))),
        "qkv_bias": bias,
        "o_bias": bias,
        "post_norms": True,
        "norm_offset": True,
        "embedding_scale": float(hf["hidden_size"]) ** 0.5,
        "logit_soft_cap": hf["final_logit_softcapping"],
    }


def _gemma2(hf: HFConfig) -> dict[str, Any]:
    return {**_gemma(hf, period=2), "attention_soft_cap": hf["attn_logit_softcapping"]}


def _gemma3(hf: HFConfig) -> dict[str, Any]:
    # Transformers carries attn_logit_softcapping over from Gemma 2, and no Gemma 3 applies it.
    period = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    return {**_gemma(hf, period), "qk_norm": True}


class _Family(NamedTuple):
    read: Callable[[HFConfig], dict[str, Any]]
    defaults: HFConfig  # what transformers assumes of fields that config.json leaves out


_BASE = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
_QWEN = {**_BASE, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA2 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = {
    **_GEMMA2,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "final_logit_softcapping": None,
}
_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(_llama, _BASE),
    "MistralForCausalLM": _Family(_mistral, {**_BASE, "sliding_window": 4096}),
    "Qwen2ForCausalLM": _Family(_qwen2, _QWEN),
    "Qwen3ForCausalLM": _Family(_qwen3, {**_QWEN, "head_dim": 128}),
    "Gemma2ForCausalLM": _Family(_gemma2, _GEMMA2),
    "Gemma3ForCausalLM": _Family(_gemma3, _GEMMA3),
}
