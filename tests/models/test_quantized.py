"""The serving tree with matrices of 8 and 4 bits: what each stands for, and what stays a float."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import ModelConfig
from jpaged.errors import ConfigError
from jpaged.models import prepare as module
from jpaged.models.forward import init_params
from jpaged.models.prepare import prepare
from jpaged.ops.grouped import GroupedRows, GroupedWeight, dequantize
from jpaged.ops.packed import PackedWeight
from tests.models.test_model_config import LLAMA
from tests.oracles.grouped import quantized_values, stored_values

CONFIG = dataclasses.replace(ModelConfig.from_hf(LLAMA), qkv_bias=True)
BITS = ("int8", "int4")


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0), "bfloat16")


def values_of(weight: GroupedWeight) -> np.ndarray:
    return np.asarray(dequantize(weight, jnp.float32))


def wide(*parts) -> np.ndarray:
    """Canonical matrices as one [D F]."""
    return np.concatenate([np.asarray(part["weight"], np.float32) for part in parts]).T


@pytest.mark.parametrize("bits", BITS)
def test_matrices_are_quantized_and_the_rest_stays(params, bits):
    """The LM head to int8 in any case."""
    serving = prepare(params, CONFIG, "float32", quantization=bits)
    layer, own = serving["model"]["layers"][1], params["model"]["layers"][1]
    attn, mlp = own["self_attn"], own["mlp"]
    wanted = {
        ("self_attn", "qkv_proj"): wide(attn["q_proj"], attn["k_proj"], attn["v_proj"]),
        ("self_attn", "o_proj"): wide(attn["o_proj"]),
        ("mlp", "gate_up_proj"): wide(mlp["gate_proj"], mlp["up_proj"]),
        ("mlp", "down_proj"): wide(mlp["down_proj"]),
    }
    for (block, name), matrix in wanted.items():
        got = values_of(layer[block][name]["weight"])
        np.testing.assert_array_equal(got, quantized_values(matrix, bits), err_msg=name)
    head = values_of(serving["lm_head"]["weight"])
    np.testing.assert_array_equal(head, quantized_values(wide(params["lm_head"]), "int8"))
    table = params["model"]["embed_tokens"]["weight"]
    np.testing.assert_array_equal(serving["model"]["embed_tokens"]["weight"], table)
    assert layer["self_attn"]["qkv_proj"]["bias"].dtype == jnp.float32
    assert layer["input_layernorm"]["weight"].dtype == jnp.float32


@pytest.mark.parametrize("bits", BITS)
def test_a_head_with_a_dtype_of_its_own_is_not_quantized(params, bits):
    serving = prepare(params, CONFIG, "bfloat16", "float32", quantization=bits)
    np.testing.assert_array_equal(serving["lm_head"]["weight"], wide(params["lm_head"]))
    assert isinstance(serving["model"]["layers"][0]["mlp"]["down_proj"]["weight"], GroupedWeight)


@pytest.mark.parametrize("implementation", ["xla", "native"])
@pytest.mark.parametrize("bits", BITS)
def test_slices_make_the_same_weights(params, monkeypatch, bits, implementation):
    def make():
        return prepare(params, CONFIG, "bfloat16", implementation=implementation, quantization=bits)

    whole = make()
    down = whole["model"]["layers"][0]["mlp"]["down_proj"]["weight"]
    assert isinstance(down, PackedWeight if implementation == "native" else GroupedWeight)
    monkeypatch.setattr(module, "SLICE", 32)
    sliced = make()
    assert jax.tree.structure(sliced) == jax.tree.structure(whole)
    jax.tree.map(np.testing.assert_array_equal, sliced, whole)


def test_slices_are_equal_and_of_whole_panels():
    sizes = {96: 1, 3072: 3, 49152: 48, 128_256: 24, 1040: 1, 7 * 1024 + 32: 5, 31: 1}
    assert {size: module._num_slices(size) for size in sizes} == sizes


def stored(rng: np.random.Generator, F: int, D: int, *, has_leasts: bool) -> GroupedRows:
    numbers = rng.integers(0, 255, (F, D // 2 if has_leasts else D), np.uint8)
    scales, leasts = (rng.normal(size=(F, D // 32)).astype(np.float16) for _ in range(2))
    return GroupedRows(
        jnp.asarray(numbers if has_leasts else numbers.view(np.int8)),
        jnp.asarray(scales),
        jnp.asarray(leasts) if has_leasts else None,
    )


def stored_wide(*parts: GroupedRows) -> np.ndarray:
    values = [
        stored_values(
            np.asarray(part.numbers),
            np.asarray(part.scales),
            None if part.leasts is None else np.asarray(part.leasts),
        )
        for part in parts
    ]
    return np.concatenate(values).T


def with_stored(params, kinds: dict[str, bool]):
    """The first layer's attention with stored numbers; of each name, whether they have leasts."""
    rng = np.random.default_rng(0)
    layer = params["model"]["layers"][0]
    attn = dict(layer["self_attn"])
    for name, has_leasts in kinds.items():
        weight = stored(rng, *attn[name]["weight"].shape, has_leasts=has_leasts)
        attn[name] = {**attn[name], "weight": weight}
    layers = {**params["model"]["layers"], 0: {**layer, "self_attn": attn}}
    tree = {**params, "model": {**params["model"], "layers": layers}}
    return tree, [attn[name]["weight"] for name in kinds]


def qkv_of(params) -> GroupedWeight:
    serving = prepare(params, CONFIG, "bfloat16", quantization="int8")
    return serving["model"]["layers"][0]["self_attn"]["qkv_proj"]["weight"]


@pytest.mark.parametrize("has_leasts", [False, True])
def test_stored_numbers_of_one_kind_are_kept(params, has_leasts):
    kinds = {"q_proj": has_leasts, "k_proj": has_leasts, "v_proj": has_leasts}
    tree, parts = with_stored(params, kinds)
    weight = qkv_of(tree)
    np.testing.assert_array_equal(values_of(weight), stored_wide(*parts))
    assert (weight.leasts is not None) == has_leasts


def test_stored_numbers_of_two_kinds_become_int8(params):
    kinds = {"q_proj": True, "k_proj": False, "v_proj": True}
    tree, parts = with_stored(params, kinds)
    wanted = quantized_values(stored_wide(*parts), "int8")
    np.testing.assert_array_equal(values_of(qkv_of(tree)), wanted)


def test_stored_numbers_beside_floats_become_int8(params):
    tree, parts = with_stored(params, {"q_proj": True})
    attn = params["model"]["layers"][0]["self_attn"]
    both = np.concatenate([stored_wide(*parts), wide(attn["k_proj"], attn["v_proj"])], axis=1)
    np.testing.assert_array_equal(values_of(qkv_of(tree)), quantized_values(both, "int8"))


def test_unknown_names_are_refused(params):
    with pytest.raises(ConfigError, match="quantization='fp8' is unknown; choose int8 or int4"):
        prepare(params, CONFIG, "float32", quantization="fp8")
