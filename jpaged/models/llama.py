"""The Llama family as one decoder: Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3.

`ModelConfig` says what a model has; nothing here asks for its name. Attribute paths are those of
Hugging Face checkpoints, so a parameter's path is its checkpoint name. The same classes run two
trees of weights: the canonical one (Hugging Face's matrices, `[out, in]`) and, with `fused=True`,
the serving one that `prepare` makes (qkv and gate-up fused, `[in, out]`, an LM head of its own).
"""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from jpaged.model_config import LayerConfig, ModelConfig
from jpaged.models.attend import AttendFn
from jpaged.ops.activation import ACTIVATIONS, gate
from jpaged.ops.heads import Heads
from jpaged.ops.kv_cache import LayerKV
from jpaged.ops.linear import add_linear, gated_linear, linear
from jpaged.ops.norm import RMSNorm
from jpaged.ops.rope import Angles, rope_angles
from jpaged.ops.rows import NormedRows, Rows, made
from jpaged.rope_config import RopeConfig
from jpaged.typing import Array, Bool, Float, Int


class Linear(nnx.Module):
    """A weight, `[out, in]` or, when fused, `[in, out]`, and perhaps a bias."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool = False, fused: bool):
        self.fused, self.row_invariant = fused, False
        self.weight = nnx.Param(jnp.zeros((num_in, num_out) if fused else (num_out, num_in)))
        self.bias = nnx.Param(jnp.zeros(num_out)) if bias else None

    def __call__(
        self,
        rows: Rows,
        dtype: DTypeLike | None = None,
        residual: Float[Array, "T F"] | None = None,
    ) -> Float[Array, "T F"]:
        """The product, in the rows' dtype or the one asked for, added to `residual`."""
        weight = self.weight.get_value() if self.fused else self.weight[...].T
        # A bias comes before the residual.
        to_add = residual if self.bias is None else None
        dtype = dtype or rows.dtype
        y = add_linear(weight, rows, dtype, to_add, row_invariant=self.row_invariant)
        if self.bias is None:
            return y
        y = y + jnp.broadcast_to(self.bias[...], y.shape)
        return y if residual is None else residual + y

    def gated(self, rows: Rows, activation: str) -> Float[Array, "T F"]:
        """activation(gate) * up of a fused weight of gates and ups, in the rows' dtype."""
        if self.bias is not None:
            return gate(self(rows), activation)
        weight, by_row = self.weight.get_value(), self.row_invariant
        return gated_linear(weight, rows, rows.dtype, activation, row_invariant=by_row)


class Embedding(nnx.Module):
    """A table of one vector per token id; in the serving tree 16-bit floats lie there as bits."""

    def __init__(self, vocab_size: int, hidden_size: int):
        self.weight = nnx.Param(jnp.zeros((vocab_size, hidden_size)))

    def __call__(self, token_ids: Int[Array, " T"], dtype: DTypeLike) -> Float[Array, "T D"]:
        """The tokens' vectors, in the table's logical dtype; ids are in range."""
        vectors = self.weight[...].at[token_ids].get(mode="promise_in_bounds")
        is_bits = vectors.dtype == jnp.uint16
        return lax.bitcast_convert_type(vectors, dtype) if is_bits else vectors


class Norm(nnx.Module):
    """RMS norm, in Llama's or in Gemma's form."""

    def __init__(self, size: int, config: ModelConfig):
        self.weight = nnx.Param(jnp.zeros(size))
        self.eps, self.row_invariant = config.rms_norm_eps, False
        self.is_offset = config.norm_offset

    def rule(self) -> RMSNorm:
        """For others to apply."""
        return RMSNorm(self.weight[...], self.eps, self.is_offset, self.row_invariant)

    def rows(self, x: Float[Array, "*rows D"]) -> NormedRows:
        """Over the last axis, for a product to make."""
        return NormedRows(x, self.rule())

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Over the last axis, in x's dtype."""
        return self.rule()(x)


class Attention(nnx.Module):
    """Projections and norms around an attention given from outside."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, fused: bool):
        self.config, self.layer = config, layer
        D, C = config.hidden_size, config.head_dim
        widths = tuple(n * C for n in (config.num_heads, *(config.num_kv_heads,) * 2))
        if fused:
            self.qkv_proj = Linear(D, sum(widths), bias=config.qkv_bias, fused=True)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                Linear(D, width, bias=config.qkv_bias, fused=False) for width in widths
            )
        self.o_proj = Linear(config.num_heads * C, D, bias=config.o_bias, fused=fused)
        self.q_norm = Norm(C, config) if config.qk_norm else None
        self.k_norm = Norm(C, config) if config.qk_norm else None
        self.fused = fused

    def __call__(
        self,
        rows: Rows,
        angles: Angles | None,
        kv: LayerKV | None,
        attend: AttendFn,
        residual: Float[Array, "T D"] | None,
    ) -> tuple[Float[Array, "T D"], LayerKV | None]:
        """Attends T tokens; `angles` are those of the layer's rope, None if it has none."""
        T = len(rows)
        heads = Heads(
            packed=self._qkv(rows).reshape(T, -1, self.config.head_dim),
            num_kv_heads=self.config.num_kv_heads,
            q_norm=None if self.q_norm is None else self.q_norm.rule(),
            k_norm=None if self.k_norm is None else self.k_norm.rule(),
            angles=angles,
        )
        out, kv = attend(
            heads,
            kv,
            scale=self.config.attention_scale,
            window=self.layer.window,
            soft_cap=self.config.attention_soft_cap,
        )
        return self.o_proj(out.reshape(T, -1), residual=residual), kv

    def _qkv(self, rows: Rows) -> Float[Array, "T widths"]:
        if self.fused:
            return self.qkv_proj(rows)
        x = made(rows)
        return jnp.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=-1)


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, fused: bool):
        D, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        if fused:
            self.gate_up_proj = Linear(D, 2 * F, bias=bias, fused=True)
        else:
            self.gate_proj = Linear(D, F, bias=bias, fused=False)
            self.up_proj = Linear(D, F, bias=bias, fused=False)
        self.down_proj = Linear(F, D, bias=bias, fused=fused)
        self.activation = config.activation
        self.fused = fused

    def __call__(self, rows: Rows, residual: Float[Array, "T D"] | None) -> Float[Array, "T D"]:
        """Every token for itself, added to `residual`."""
        if self.fused:
            gated = self.gate_up_proj.gated(rows, self.activation)
        else:
            x = made(rows)
            gated = ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(gated, residual=residual)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each added to the stream of hidden states.

    With `post_norms` (Gemma 2, 3) their results are normalized too, and checkpoints then call the
    norm before the MLP `pre_feedforward_layernorm` and the one after attention what Llama calls
    the one before the MLP.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, *, fused: bool):
        D = config.hidden_size
        self.self_attn = Attention(config, layer, fused=fused)
        self.mlp = MLP(config, fused=fused)
        self.input_layernorm = Norm(D, config)
        self.post_attention_layernorm = Norm(D, config)
        self.pre_feedforward_layernorm = Norm(D, config) if config.post_norms else None
        self.post_feedforward_layernorm = Norm(D, config) if config.post_norms else None

    def __call__(
        self,
        hidden: Float[Array, "T D"],
        angles: Angles | None,
        kv: LayerKV | None,
        attend: AttendFn,
    ) -> tuple[Float[Array, "T D"], LayerKV | None]:
        """Runs T tokens through the layer."""
        rows = self.input_layernorm.rows(hidden)
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            hidden, kv = self.self_attn(rows, angles, kv, attend, hidden)
            return self.mlp(self.post_attention_layernorm.rows(hidden), hidden), kv
        attended, kv = self.self_attn(rows, angles, kv, attend, None)
        hidden = hidden + self.post_attention_layernorm(attended)
        transformed = self.mlp(self.pre_feedforward_layernorm.rows(hidden), None)
        return hidden + self.post_feedforward_layernorm(transformed), kv


class Decoder(nnx.Module):
    """Token ids to the last hidden states, through all layers."""

    def __init__(self, config: ModelConfig, *, fused: bool):
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nnx.List(DecoderLayer(config, layer, fused=fused) for layer in config.layers)
        self.norm = Norm(config.hidden_size, config)

    def __call__(
        self,
        token_ids: Int[Array, " T"],
        positions: Int[Array, " T"],
        lengths: Int[Array, " T"],
        kv: tuple[LayerKV | None, ...],
        attend: AttendFn,
        is_token: Bool[Array, " T"] | None = None,
    ) -> tuple[Float[Array, "T D"], tuple[LayerKV | None, ...]]:
        """Runs T tokens; `lengths` as in `rope_angles`, one `kv` a layer.

        is_token: what is none begins as zeros, and biases apart stays so: products in C++ skip
            zeros at the end.
        """
        hidden = self.embed_tokens(token_ids, self.norm.weight[...].dtype)
        if is_token is not None:
            hidden = jnp.where(is_token[:, None], hidden, 0)
        if self.config.embedding_scale is not None:
            hidden = hidden * jnp.asarray(self.config.embedding_scale, hidden.dtype)
        angles = self._angles(positions, lengths)
        new_kv = []
        for layer, layer_config, layer_kv in zip(self.layers, self.config.layers, kv, strict=True):
            hidden, layer_kv = layer(hidden, angles[layer_config.rope], layer_kv, attend)
            new_kv.append(layer_kv)
        return self.norm(hidden), tuple(new_kv)

    def _angles(
        self, positions: Int[Array, " T"], lengths: Int[Array, " T"]
    ) -> dict[RopeConfig | None, Angles | None]:
        """Once for each rope of the model, not once a layer."""
        ropes = {layer.rope for layer in self.config.layers}
        return {
            rope: None if rope is None else rope_angles(rope, positions, lengths) for rope in ropes
        }


class CausalLM(nnx.Module):
    """A decoder and its LM head. A tied model has a head of its own only in the serving tree."""

    def __init__(self, config: ModelConfig, *, fused: bool):
        self.config = config
        self.model = Decoder(config, fused=fused)
        has_head = fused or not config.tied
        D, V = config.hidden_size, config.vocab_size
        self.lm_head = Linear(D, V, fused=fused) if has_head else None

    def logits(self, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """float32 logits of the token after each last hidden state."""
        if self.lm_head is None:
            logits = linear(self.model.embed_tokens.weight[...].T, hidden, jnp.float32)
        else:
            # A head in float32 multiplies hidden states of any dtype as they are.
            dtype = self.lm_head.weight.get_value().dtype
            hidden = hidden if dtype is None else hidden.astype(dtype)
            logits = self.lm_head(hidden, jnp.float32)
        soft_cap = self.config.logit_soft_cap
        return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
