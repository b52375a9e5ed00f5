"""Bits of the paged forward: in the deterministic mode those of a row alone, in any batch."""

import numpy as np
import pytest

from jpaged.models.forward import make_forward
from tests.models.paged import empty_cache, run_paged
from tests.models.test_forward import PROMPT_LENS, make_model, random_sequences

pytestmark = pytest.mark.optimized


def runs_alone_and_together(dtype: str, *, deterministic: bool) -> tuple[list[np.ndarray], ...]:
    config, _, serving = make_model("gemma2", dtype)
    forward = make_forward(config, deterministic=deterministic)
    sequences = random_sequences(config)

    def run(rows: list[int], chunk: int) -> list[np.ndarray]:
        cache = empty_cache(config, len(rows), dtype)
        chosen, prompt_lens = ([x[row] for row in rows] for x in (sequences, PROMPT_LENS))
        return run_paged(forward, serving, cache, chosen, prompt_lens, chunk=chunk)

    return [run([row], 5)[0] for row in (0, 1)], run([0, 1], 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_bits_do_not_depend_on_the_batch(dtype: str):
    alone, together = runs_alone_and_together(dtype, deterministic=True)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_bits_do_depend_on_the_batch_without_determinism():
    """The control: what the mode is for shows on this model."""
    alone, together = runs_alone_and_together("float32", deterministic=False)
    assert any(np.any(one != other) for one, other in zip(alone, together, strict=True))
