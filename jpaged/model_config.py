"""What a model is: every field resolved, foreign names ended here.

`ModelConfig.from_hf` is the only place that reads a Hugging Face config. After it every field has a
value, and per-layer differences are data in `layers`, not subclasses.
"""

import dataclasses
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a layer. `kind` selects which of the scaling fields matter."""

    theta: float
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    rotary_dim: int  # of head_dim
    factor: float = 1.0
    original_max_position: int = 0
    # further fields (yarn: beta_fast, beta_slow, attention_factor, ...; llama3: low/high_freq_factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What differs between layers: the attention window (None: full) and the rope (None: no rope)."""

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
    # further fields: rms_norm_eps, activation, biases, qk_norm, tied, query scale, soft caps,
    # norm offset, embedding scale, post norms, bos/eos ids, ...

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def from_hf(cls, hf: dict[str, Any]) -> "ModelConfig":
        raise NotImplementedError
