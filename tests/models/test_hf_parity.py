"""Logits equal Hugging Face's, live and recorded, on both trees of parameters."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.model_config import ModelConfig
from jpaged.models.forward import dense_forward
from jpaged.models.prepare import prepare
from tests.models import hf_models
from tests.models.hf_models import CASES, read_fixture

SHIPPED = Path(__file__).parent.parent / "fixtures" / "arch"
SHIPPED_FIXTURES = ("llama_llama3rope", "mistral_sw16", "qwen3", "gemma3_text")
SHARED_FIXTURES = (
    "llama_bfloat16",
    "llama_bias_tied",
    "llama_float16",
    "llama_linear_rope",
    "llama_yarn",
    "qwen2",
)


def assert_logits_equal(got: jax.Array, want: np.ndarray) -> None:
    """To 1e-4 of the largest logit: float32 rounding in another order."""
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_a_live_model(name: str):
    hf_model = hf_models.make_hf_model(CASES[name])
    config = ModelConfig.from_hf(hf_models.hf_config_dict(hf_model))
    params = hf_models.hf_params(hf_model, config)
    token_ids = np.random.default_rng(0).integers(0, config.vocab_size, 40, dtype=np.int32)
    want = hf_models.hf_logits(hf_model, token_ids)

    assert_logits_equal(jax.jit(dense_forward(config))(params, token_ids), want)
    serving = prepare(params, config, jnp.float32)
    assert_logits_equal(jax.jit(dense_forward(config, fused=True))(serving, token_ids), want)


def check_fixture(folder: Path, config_name: str) -> None:
    fixture = read_fixture(folder, config_name)
    forward = jax.jit(dense_forward(fixture.config))
    params = jax.tree.map(lambda x: x.astype(jnp.float32), fixture.params)
    longest = max(len(token_ids) for token_ids in fixture.token_ids)
    for token_ids, want in zip(fixture.token_ids, fixture.logits, strict=True):
        padded = np.pad(token_ids, (0, longest - len(token_ids)))
        assert_logits_equal(forward(params, padded)[: len(token_ids)], want)


@pytest.mark.parametrize("config_name", ["config.json", "config.v4.json"])
@pytest.mark.parametrize("name", SHIPPED_FIXTURES)
def test_logits_equal_the_recorded(name: str, config_name: str):
    check_fixture(SHIPPED / name, config_name)


@pytest.mark.parametrize("config_name", ["config.json", "config.v4.json"])
@pytest.mark.parametrize("name", SHARED_FIXTURES)
def test_logits_equal_the_recorded_in_the_wide_sweep(
    name: str, config_name: str, shared_fixtures: Path
):
    check_fixture(shared_fixtures / "fixtures" / "arch" / name, config_name)
