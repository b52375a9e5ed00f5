"""Scores of prompt tokens, below the engine: what they need, and what they never make."""

import functools as ft
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from jpaged.core.prompt_scores import SCORE_TOKENS
from jpaged.core.state import init_state
from jpaged.core.step import StepInputs, step
from tests.core.scripted import VOCAB_SIZE, counting_forward, counting_kv, counting_params

NUM_TOKENS = 512


def shapes_in(jaxpr) -> Iterator[tuple[int, ...]]:
    """The shapes of all that a program computes, inside of loops and branches too."""
    for equation in jaxpr.eqns:
        yield from (var.aval.shape for var in equation.outvars)
        for value in equation.params.values():
            inner = value if isinstance(value, list | tuple) else [value]
            for one in inner:
                if hasattr(one, "jaxpr"):
                    yield from shapes_in(one.jaxpr)
                elif hasattr(one, "eqns"):
                    yield from shapes_in(one)


@pytest.mark.parametrize("num_top", [0, 8])
def test_no_array_of_tokens_by_vocabulary_is_made(num_top: int):
    state = init_state(
        counting_kv(600, 4),
        num_rows=4,
        max_blocks_per_row=150,
        hash_key=jnp.arange(4, dtype=jnp.uint32),
    )
    rows = jnp.arange(1, 5, dtype=jnp.int32)
    inputs = StepInputs(rows, rows * 100, jnp.arange(4), rows * 0, score_from=rows)
    run = ft.partial(
        step,
        forward=counting_forward,
        num_tokens=NUM_TOKENS,
        num_decode_rows=0,
        num_prompt_top=num_top,
    )
    shapes = set(shapes_in(jax.make_jaxpr(run)(counting_params(), state, inputs).jaxpr))
    assert (SCORE_TOKENS, VOCAB_SIZE) in shapes, "the logits of a tile"
    largest = max(size for shape in shapes if VOCAB_SIZE in shape for size in shape)
    assert largest < NUM_TOKENS
