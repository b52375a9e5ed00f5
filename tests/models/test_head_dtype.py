"""The option of an LM head in float32: its weights as the checkpoint has them, no rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged import LLM, SamplingParams
from jpaged.config import ModelConfig
from jpaged.errors import ConfigError
from jpaged.loading import load_params
from jpaged.models.forward import init_params, make_forward
from jpaged.models.prepare import prepare
from tests.loading.checkpoints import TINY, tiny_tensors, write_hf
from tests.models.test_model_config import LLAMA


@pytest.mark.parametrize("tied", [False, True])
def test_a_float32_head_gives_the_float32_product(tied: bool):
    config = ModelConfig.from_hf(LLAMA | {"tie_word_embeddings": tied})
    params = init_params(config, jax.random.key(0), "float32")
    hidden = jax.random.normal(jax.random.key(1), (4, config.hidden_size)).astype(jnp.bfloat16)
    serving = prepare(params, config, "bfloat16", "float32")
    head = params["model"]["embed_tokens"] if tied else params["lm_head"]
    want = np.asarray(hidden.astype(jnp.float32)) @ np.asarray(head["weight"]).T
    got = make_forward(config).logits(serving, hidden)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())
    rounded = make_forward(config).logits(prepare(params, config, "bfloat16"), hidden)
    assert np.abs(np.asarray(rounded) - want).max() > 1e-4 * np.abs(want).max()
    table = serving["model"]["embed_tokens"]["weight"]
    assert table.dtype == jnp.uint16, "the table is served in 16 bits all the same"


def test_it_is_read_and_updated_as_precise_as_it_is(tmp_path):
    path = write_hf(tmp_path, TINY, tiny_tensors(TINY))
    config = ModelConfig.from_hf(TINY)
    params = load_params(path, config, "bfloat16", head_dtype="float32")
    head = params["model"]["embed_tokens"] if config.tied else params["lm_head"]
    assert head["weight"].dtype == jnp.float32
    assert params["model"]["norm"]["weight"].dtype == jnp.bfloat16


def test_an_engine_runs_with_it_and_takes_new_weights():
    config = ModelConfig.from_hf(LLAMA)
    params = init_params(config, jax.random.key(0), "float32")
    sizes = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM(model=config, params=params, dtype="bfloat16", head_dtype="float32", **sizes) as llm:
        assert llm.engine._device.params["lm_head"]["weight"].dtype == jnp.float32
        before = llm.generate([[1, 2, 3]], greedy, use_tqdm=False)
        llm.update_params(params)
        assert llm.engine._device.params["lm_head"]["weight"].dtype == jnp.float32
        after = llm.generate([[1, 2, 3]], greedy, use_tqdm=False)
    assert before[0].outputs[0].token_ids == after[0].outputs[0].token_ids


def test_other_dtypes_are_refused():
    with pytest.raises(ConfigError, match="head_dtype='float16' is unknown; choose auto or"):
        LLM("nowhere", head_dtype="float16")
