"""Compiled programs with a real model: no second KV cache, no second compilation."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.core.beam import beam_window, spread
from jpaged.core.beam_rules import Beams, init_beams
from jpaged.core.rows import Admissions, admit, fork, release
from jpaged.core.sampling import init_sampling_state
from jpaged.core.state import EngineState, init_state
from jpaged.core.step import StepInputs, decode_window, step
from jpaged.model_config import ModelConfig
from jpaged.models.forward import init_params, make_forward
from jpaged.models.prepare import prepare
from jpaged.ops.kv_cache import init_layer_kv
from tests.native.kernels import load_or_skip

pytestmark = pytest.mark.optimized

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, VOCAB_SIZE = 2, 2, 16, 64
NUM_BLOCKS, BLOCK_SIZE, BLOCKS_PER_ROW = 4096, 16, 2
B, NUM_TOKENS = 2, 16
CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
)


def make_state(dtype: str) -> EngineState:
    kv = tuple(
        init_layer_kv(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype, platform_is_cpu=True)
        for _ in range(NUM_LAYERS)
    )
    return init_state(
        kv,
        num_rows=4,
        max_blocks_per_row=BLOCKS_PER_ROW,
        hash_key=jnp.array([1, 2, 3, 4], jnp.uint32),
        num_stop_ids=2,
    )


def make_params(dtype: str):
    return prepare(init_params(CONFIG, jax.random.key(0), jnp.dtype(dtype)), CONFIG, dtype)


def ids(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def make_admissions() -> Admissions:
    return Admissions(
        row_ids=ids(1, 2),
        token_ids=jnp.arange(2 * 16, dtype=jnp.int32).reshape(2, 16),
        num_tokens=ids(5, 9),
        prompt_len=ids(5, 9),
        request_root=jnp.zeros((2, 4), jnp.uint32),
        sample_index=ids(0, 0),
        adapter_id=ids(0, 0),
        most_cached=ids(16, 16),
        sampling=init_sampling_state(2, 2).replace(
            max_len=ids(30, 30), temperature=jnp.array([0, 1], jnp.float32)
        ),
    )


def make_beams() -> Beams:
    return init_beams(jnp.array([[3, 4]], jnp.int32), ids(22), max_tokens=8)


def make_programs(dtype: str, implementation: str) -> dict:
    """Every program that changes the state, in an order in which they can follow each other."""
    params, forward = make_params(dtype), make_forward(CONFIG, implementation=implementation)
    run_step = ft.partial(step, forward=forward, num_tokens=NUM_TOKENS, num_decode_rows=0)
    run_mixed = ft.partial(step, forward=forward, num_tokens=NUM_TOKENS, num_decode_rows=1)
    run_window = ft.partial(decode_window, forward=forward, num_steps=3)
    run_beams = ft.partial(beam_window, forward=forward, num_steps=3, num_candidates=4)
    token_ids = jnp.zeros((2, 16), jnp.int32)
    inputs = StepInputs(ids(1, 2), ids(16, 16), ids(0, 1), ids(0, 0))
    return {
        "admit": lambda s: admit(s, make_admissions()),
        "step": lambda s: run_step(params, s, inputs),
        "mixed step": lambda s: run_mixed(params, s, inputs),
        "window": lambda s: run_window(params, s, ids(1, 2)),
        "beam window": lambda s: (run_beams(params, s, make_beams())[0], None),
        "spread": lambda s: (spread(s, ids(1, 0), ids(3, 0), token_ids, ids(16, 0)), None),
        "fork": lambda s: (fork(s, ids(1, 0), ids(3, 0), ids(1, 0)), None),
        "release": lambda s: (release(s, ids(1, 2)), None),
    }


@pytest.fixture(
    scope="module",
    params=[
        ("bfloat16", "native"),
        pytest.param(("float32", "xla"), marks=pytest.mark.slow),
        pytest.param(("float32", "native"), marks=pytest.mark.slow),
        pytest.param(("bfloat16", "xla"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def programs(request):
    """The jitted programs and their dtype, the state donated."""
    dtype, implementation = request.param
    if implementation == "native":
        load_or_skip()
    programs = make_programs(dtype, implementation)
    return dtype, {name: jax.jit(f, donate_argnums=0) for name, f in programs.items()}


def test_no_program_holds_a_second_kv_cache(programs):
    dtype, jitted = programs
    state = jax.eval_shape(ft.partial(make_state, dtype))
    kv_bytes = sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state.kv))
    # One layer's K or V is a quarter of the cache: a copy of the smallest part would show.
    for name, program in jitted.items():
        memory = program.lower(state).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= kv_bytes, name
        assert memory.temp_size_in_bytes < kv_bytes / 8, name
        assert memory.output_size_in_bytes < kv_bytes * 9 / 8, name


def test_a_state_that_comes_back_compiles_nothing(programs):
    dtype, jitted = programs
    state = make_state(dtype)
    avals = jax.tree.map(jax.typeof, state)
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.kv)]
    for _ in range(2):
        for name, program in jitted.items():
            state, _ = program(state)
            # Equal avals: shape, dtype and weak type, on which the compilation depends.
            assert jax.tree.map(jax.typeof, state) == avals, name
            assert program._cache_size() == 1, name
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.kv)] == addresses
