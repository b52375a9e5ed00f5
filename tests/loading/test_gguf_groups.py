"""GGUF's own numbers, taken over exactly: against the gguf package, and byte by byte."""

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.loading import open_tensors
from jpaged.loading.gguf_groups import has_groups, read_groups
from jpaged.loading.stored import StoredTensor, read_tensor
from jpaged.ops.grouped import dequantize, transpose
from tests.loading.checkpoints import close_writer, gguf_writer

KINDS = ("Q8_0", "Q4_0", "Q4_1")


def write(folder: Path, kind: str, name: str = "token_embd.weight") -> StoredTensor:
    """A tensor [64, 96] of random bytes, and finite scales of either sign."""
    rng, quant = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    block_bytes = gguf.GGML_QUANT_SIZES[quant][1]
    blocks = rng.integers(0, 256, (64, 3, block_bytes), np.uint8)
    num_halves = 2 if kind == "Q4_1" else 1
    halves = rng.normal(size=(64, 3, num_halves)).astype(np.float16)
    blocks[:, :, : 2 * num_halves] = halves.view(np.uint8)
    writer = gguf_writer(folder / "model.gguf", embedding_length=96)
    writer.add_tensor(name, blocks.reshape(64, -1), raw_dtype=quant)
    close_writer(writer)
    (tensor,) = open_tensors(folder).values()
    return tensor


def values_of(tensor: StoredTensor) -> np.ndarray:
    rows = jax.tree.map(jnp.asarray, read_groups(tensor))
    return np.asarray(dequantize(transpose(rows), jnp.float32)).T


@pytest.mark.parametrize("kind", KINDS)
def test_they_stand_for_what_the_package_says(tmp_path: Path, kind: str):
    tensor = write(tmp_path, kind)
    assert has_groups(tensor)
    np.testing.assert_array_equal(values_of(tensor), read_tensor(tensor, "float32"))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_scales_are_the_files_bytes(tmp_path: Path, kind: str):
    tensor = write(tmp_path, kind)
    assert tensor.read_raw is not None
    blocks, rows = tensor.read_raw(0, 64).reshape(64, 3, -1), read_groups(tensor)
    num_numbers = 32 if kind == "Q8_0" else 16
    wanted = blocks[:, :, -num_numbers:].reshape(64, -1)
    np.testing.assert_array_equal(np.asarray(rows.numbers).view(np.uint8), wanted)
    assert rows.numbers.dtype == (np.int8 if kind == "Q8_0" else np.uint8)
    np.testing.assert_array_equal(
        np.asarray(rows.scales).view(np.uint8).reshape(64, 3, 2), blocks[:, :, :2]
    )
    assert (rows.leasts is None) == (kind == "Q8_0")


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_slices_go_where_they_belong(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """Llama's queries lie in another order in the file."""
    tensor = write(tmp_path, kind, "blk.0.attn_q.weight")
    assert tensor.row_order is not None
    monkeypatch.setattr("jpaged.loading.stored._SLICE", 5 * 96)
    np.testing.assert_array_equal(values_of(tensor), read_tensor(tensor, "float32"))


def test_other_tensors_have_no_groups(tmp_path: Path):
    writer = gguf_writer(tmp_path / "model.gguf")
    quant = gguf.GGMLQuantizationType.Q5_0
    packed = gguf.quants.quantize(np.ones((64, 32), np.float32), quant)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=quant)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    close_writer(writer)
    assert not any(has_groups(tensor) for tensor in open_tensors(tmp_path).values())
