"""What a model is: every field resolved, foreign names ended here.

`ModelConfig.from_hf` is the only place that reads a Hugging Face config, in the style of
transformers 5 (`rope_parameters`, `dtype`) or 4 (`rope_theta`, `rope_scaling`, `torch_dtype`).
After it every field has a value, and per-layer differences are data in `layers`, not subclasses.
"""

import dataclasses
from collections.abc import Callable, Container
from typing import Any, Literal, NamedTuple

from jpaged.errors import ConfigError, UnsupportedModelError
from jpaged.rope_config import (
    HFConfig,
    RopeConfig,
    read_rope,
    require_int,
    require_number,
    scaled_max_position,
)

Activation = Literal["silu", "gelu", "gelu_tanh"]

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


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
    max_position: int  # the longest context, rope scaling included
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
        """How many layers there are."""
        return len(self.layers)

    @property
    def widest_window(self) -> int | None:
        """The window beyond which no layer sees; None: some layer sees everything."""
        windows = [layer.window for layer in self.layers if layer.window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @property
    def dynamic_rope_start(self) -> int | None:
        """The prompt length above which KV depends on the prompt's length; None: it never does."""
        ropes = (layer.rope for layer in self.layers if layer.rope is not None)
        starts = (rope.original_max_position for rope in ropes if rope.kind == "dynamic")
        return min(starts, default=None)

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
        return cls(architecture=architecture, **{**_common(hf), **family.read(hf)})


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


def _common(hf: HFConfig) -> dict[str, Any]:
    num_heads, head_dim = require_int(hf, "num_attention_heads"), _head_dim(hf)
    return {
        "vocab_size": require_int(hf, "vocab_size"),
        "hidden_size": require_int(hf, "hidden_size"),
        "intermediate_size": require_int(hf, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_heads if (n := hf.get("num_key_value_heads")) is None else n,
        "head_dim": head_dim,
        "max_position": scaled_max_position(hf, head_dim),
        "dtype": _dtype(hf),
        "rms_norm_eps": require_number(hf, "rms_norm_eps"),
        "activation": _activation(hf),
        "tied": bool(hf.get("tie_word_embeddings")),
        "attention_scale": head_dim**-0.5,
    }


def _head_dim(hf: HFConfig) -> int:
    if hf.get("head_dim") is not None:
        return require_int(hf, "head_dim")
    hidden_size, num_heads = (
        require_int(hf, name) for name in ("hidden_size", "num_attention_heads")
    )
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


# ---- Layers ----


def _layers(hf: HFConfig, sliding: Container[int]) -> tuple[LayerConfig, ...]:
    """`sliding` are the layers that slide by the family's rule; `layer_types` overrides it."""
    num_layers = require_int(hf, "num_hidden_layers")
    layer_types = hf.get("layer_types") or [
        "sliding_attention" if i in sliding else "full_attention" for i in range(num_layers)
    ]
    if len(layer_types) != num_layers:
        raise ConfigError(
            f"layer_types has {len(layer_types)} entries for num_hidden_layers={num_layers}"
        )
    layer_of_type = {layer_type: _layer(hf, layer_type) for layer_type in set(layer_types)}
    return tuple(layer_of_type[layer_type] for layer_type in layer_types)


def _layer(hf: HFConfig, layer_type: str) -> LayerConfig:
    if layer_type == "full_attention":
        return LayerConfig(window=None, rope=read_rope(hf, layer_type, _head_dim(hf)))
    if layer_type != "sliding_attention":
        raise UnsupportedModelError(
            f"layer_types has {layer_type!r}; implemented are full_attention, sliding_attention"
        )
    return LayerConfig(
        window=require_int(hf, "sliding_window"), rope=read_rope(hf, layer_type, _head_dim(hf))
    )


# ---- Families ----


def _llama(hf: HFConfig) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias"))
    return {
        "layers": _layers({**hf, "layer_types": None}, sliding=()),
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(hf.get("mlp_bias")),
    }


def _mistral(hf: HFConfig) -> dict[str, Any]:
    has_window = hf["sliding_window"] is not None
    return {"layers": _layers(hf, sliding=range(hf["num_hidden_layers"] if has_window else 0))}


def _qwen_layers(hf: HFConfig) -> tuple[LayerConfig, ...]:
    """The first `max_window_layers` layers see everything, if the others slide at all."""
    if not hf["use_sliding_window"] or hf["sliding_window"] is None:
        return _layers({**hf, "sliding_window": None}, sliding=())
    return _layers(hf, sliding=range(hf["max_window_layers"], hf["num_hidden_layers"]))


def _qwen2(hf: HFConfig) -> dict[str, Any]:
    return {"layers": _qwen_layers(hf), "qkv_bias": True}


def _qwen3(hf: HFConfig) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias"))
    return {"layers": _qwen_layers(hf), "qkv_bias": bias, "o_bias": bias, "qk_norm": True}


def _gemma(hf: HFConfig, period: int) -> dict[str, Any]:
    """Every `period`-th layer is global, the others slide."""
    num_layers, bias = require_int(hf, "num_hidden_layers"), bool(hf.get("attention_bias"))
    return {
        "layers": _layers(hf, sliding=[i for i in range(num_layers) if (i + 1) % period]),
        "qkv_bias": bias,
        "o_bias": bias,
        "post_norms": True,
        "norm_offset": True,
        "embedding_scale": hf["hidden_size"] ** 0.5,
        "attention_scale": require_number(hf, "query_pre_attn_scalar") ** -0.5,
        "logit_soft_cap": hf["final_logit_softcapping"],
    }


def _gemma2(hf: HFConfig) -> dict[str, Any]:
    return {**_gemma(hf, period=2), "attention_soft_cap": hf["attn_logit_softcapping"]}


def _gemma3(hf: HFConfig) -> dict[str, Any]:
    # Transformers carries attn_logit_softcapping over from Gemma 2, and no Gemma 3 applies it.
    period = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    # Its max_position_embeddings is the context that scaling has already stretched.
    max_position = require_int(hf, "max_position_embeddings")
    return {**_gemma(hf, period), "qk_norm": True, "max_position": max_position}


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
