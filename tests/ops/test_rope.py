"""Rope against rotations of complex numbers; the scalings are judged by Hugging Face's logits."""

import jax.numpy as jnp
import numpy as np

from jpaged.ops.rope import apply_rope, rope_angles
from jpaged.rope_config import RopeConfig

POSITIONS = np.array([0, 1, 7, 5000], np.int32)


def test_pairs_turn_as_complex_numbers():
    rope = RopeConfig(theta=100.0, rotary_dim=8)
    x = np.random.default_rng(0).normal(size=(4, 2, 12)).astype(np.float32)
    positions = jnp.asarray(POSITIONS)
    got = apply_rope(jnp.asarray(x), *rope_angles(rope, positions, positions))

    inv_freq = 100.0 ** -(np.arange(4) / 4)
    turn = np.exp(1j * POSITIONS[:, None] * inv_freq)[:, None]
    pairs = (x[..., :4] + 1j * x[..., 4:8]) * turn
    want = np.concatenate([pairs.real, pairs.imag, x[..., 8:]], axis=-1)
    np.testing.assert_allclose(got, want, atol=2e-3)  # float32 angles of position 5000
    np.testing.assert_allclose(got[:3], want[:3], atol=1e-5)


def test_dynamic_rope_is_plain_up_to_the_original_context_and_slower_beyond():
    plain = RopeConfig(theta=100.0, rotary_dim=8)
    dynamic = RopeConfig(
        theta=100.0, rotary_dim=8, kind="dynamic", factor=2.0, original_max_position=16
    )
    positions = jnp.full(4, 3, jnp.int32)
    lengths = jnp.asarray([4, 16, 17, 64], jnp.int32)
    _, want = rope_angles(plain, positions, lengths)
    _, got = rope_angles(dynamic, positions, lengths)
    np.testing.assert_allclose(got[:2], want[:2], rtol=1e-6)
    slowest = np.arcsin(got[:, -1])
    assert slowest[1] > slowest[2] > slowest[3] > 0
    np.testing.assert_allclose(got[:, 0], want[:, 0], rtol=1e-6)  # the fastest pair is kept
