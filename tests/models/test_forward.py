"""The paged forward against dense ones: chunks, decoding, dynamic rope; and the trees."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jpaged.errors import UnsupportedModelError
from jpaged.model_config import ModelConfig
from jpaged.models.forward import dense_forward, init_params, make_forward
from jpaged.models.prepare import param_bytes, prepare
from jpaged.models.registry import MODELS, abstract_model, abstract_params, canonical_paths
from tests.models import hf_models
from tests.models.hf_models import CASES
from tests.models.paged import empty_cache, make_batch, run_paged

PROMPT_LENS = (19, 6)


def make_model(name: str, dtype: str = "float32"):
    """A case's config, canonical and serving parameters; no Hugging Face model is kept."""
    hf_model = hf_models.make_hf_model(CASES[name])
    config = ModelConfig.from_hf(hf_models.hf_config_dict(hf_model))
    params = hf_models.hf_params(hf_model, config)
    return config, params, prepare(params, config, dtype)


def random_sequences(config: ModelConfig) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, config.vocab_size, n + 12, dtype=np.int32) for n in PROMPT_LENS]


@pytest.mark.parametrize("name", ["llama_bias_tied", "mistral", "qwen2_window", "gemma2", "gemma3"])
def test_paged_equals_dense(name: str):
    config, _, serving = make_model(name)
    sequences = random_sequences(config)
    cache = empty_cache(config, len(sequences))
    got = run_paged(make_forward(config), serving, cache, sequences, PROMPT_LENS, chunk=5)
    dense = jax.jit(dense_forward(config, fused=True))
    for logits, token_ids in zip(got, sequences, strict=True):
        padded = np.pad(token_ids, (0, len(sequences[0]) - len(token_ids)))
        want = dense(serving, padded)[: len(token_ids)]
        np.testing.assert_allclose(logits, want, rtol=0, atol=1e-4 * float(jnp.abs(want).max()))


@pytest.mark.parametrize("name", ["mistral", "qwen2_window", "gemma2", "gemma3"])
def test_padding_stays_zero(name: str):
    """As products in C++ want it, which skip it then."""
    config, _, serving = make_model(name)
    sequences, num_new = random_sequences(config), (3, 2)
    batch = make_batch(*(sequences, (0, 0), num_new, PROMPT_LENS), num_tokens=16, num_decode_rows=0)
    cache = empty_cache(config, len(sequences))
    hidden, _ = jax.jit(make_forward(config).hidden)(serving, batch, cache)
    assert np.asarray(hidden[: sum(num_new)] != 0).any(axis=-1).all()
    np.testing.assert_array_equal(hidden[sum(num_new) :], np.zeros_like(hidden[sum(num_new) :]))


def test_dynamic_rope_follows_the_longer_of_prompt_and_position():
    """Hugging Face's own cache: a prompt above and one below the 16 positions of the original."""
    config, _, serving = make_model("llama_dynamic_beyond")
    sequences = random_sequences(config)
    cache = empty_cache(config, len(sequences))
    got = run_paged(make_forward(config), serving, cache, sequences, PROMPT_LENS, chunk=5)
    for logits, token_ids, prompt_len in zip(got, sequences, PROMPT_LENS, strict=True):
        want = cached_hf_logits("llama_dynamic_beyond", token_ids, prompt_len)
        np.testing.assert_allclose(logits, want, rtol=0, atol=1e-4 * np.abs(want).max())


def cached_hf_logits(name: str, token_ids: np.ndarray, prompt_len: int) -> np.ndarray:
    hf_model = hf_models.make_hf_model(CASES[name])
    cache, logits = None, []
    parts = [token_ids[:prompt_len], *np.split(token_ids[prompt_len:], len(token_ids) - prompt_len)]
    with torch.no_grad():
        for part in parts:
            out = hf_model(torch.tensor(part[None]), cache=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits[0].numpy())
    return np.concatenate(logits)


def test_make_forward_gives_the_same_object_for_equal_configs():
    config, _, _ = make_model("llama")
    assert make_forward(config) is make_forward(dataclasses.replace(config))


@pytest.mark.parametrize("name", ["llama_bias_tied", "qwen3", "gemma2"])
def test_gradients_are_finite_and_reach_every_parameter(name: str):
    config, params, _ = make_model(name)
    token_ids = jnp.asarray(np.random.default_rng(2).integers(0, 96, (2, 9), np.int32))

    def loss(params: dict) -> jax.Array:
        logits = jax.vmap(dense_forward(config), (None, 0))(params, token_ids)
        log_probs = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_probs, token_ids[:, 1:, None], axis=-1))

    grads = jax.jit(jax.grad(loss))(params)
    for path, grad in jax.tree.leaves_with_path(grads):
        assert jnp.isfinite(grad).all(), path
        assert jnp.any(grad != 0), path


def test_serving_tree_is_what_the_fused_model_expects():
    for name in ("llama_bias_tied", "qwen3", "gemma3"):
        config, params, _ = make_model(name)
        serving = jax.eval_shape(lambda p, config=config: prepare(p, config, "bfloat16"), params)
        _, expected = abstract_model(config, fused=True)
        shapes = jax.tree.map(lambda leaf: leaf.shape, expected)
        assert jax.tree.map(lambda leaf: leaf.shape, serving) == shapes
        table = serving["model"].pop("embed_tokens")["weight"]
        assert table.dtype == jnp.uint16  # bits
        assert {leaf.dtype for leaf in jax.tree.leaves(serving)} == {jnp.dtype("bfloat16")}


def test_a_tied_head_is_counted_twice_in_the_serving_tree():
    config, params, serving = make_model("llama_bias_tied", "bfloat16")
    head = config.vocab_size * config.hidden_size
    assert param_bytes(serving) == param_bytes(params) // 2 + 2 * head


def test_init_params_gives_a_canonical_tree_that_runs():
    config, _, _ = make_model("gemma3")
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    assert jax.eval_shape(lambda: params) == abstract_params(config, jnp.bfloat16)
    logits = jax.jit(dense_forward(config))(params, jnp.arange(5))
    assert logits.dtype == jnp.float32
    assert jnp.isfinite(logits).all()
    assert jnp.std(logits) > 0


def test_canonical_paths_are_checkpoint_names():
    hf_model = hf_models.make_hf_model(CASES["qwen3"])
    config = ModelConfig.from_hf(hf_models.hf_config_dict(hf_model))
    assert set(canonical_paths(config)) == set(hf_model.state_dict())
    path = canonical_paths(config)["model.layers.1.self_attn.q_norm.weight"]
    assert path == ("model", "layers", 1, "self_attn", "q_norm", "weight")


def test_an_architecture_without_a_class_is_refused():
    config, _, _ = make_model("llama")
    stranger = dataclasses.replace(config, architecture="StrangerForCausalLM")
    with pytest.raises(UnsupportedModelError, match=r"StrangerForCausalLM.*LlamaForCausalLM"):
        abstract_params(stranger, jnp.float32)
    assert config.architecture in MODELS
