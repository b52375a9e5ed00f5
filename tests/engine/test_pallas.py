"""A tiny model served by the kernels for GPUs, interpreted on a CPU: the same tokens as XLA's."""

from typing import Any, NamedTuple

import pytest
from jax.experimental import pallas as pl

from jpaged import LLM, SamplingParams
from jpaged.config import ModelConfig
from jpaged.core.state import check_invariants
from tests.engine.test_llm import tiny_params
from tests.models.test_model_config import GEMMA2, LLAMA

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 48,
    "block_size": 4,
    "max_num_seqs": 2,  # few buckets: few programs to compile
    "max_num_batched_tokens": 12,
    "num_decode_steps": 3,
    "num_gpu_blocks_override": 13,  # too few for two: one has to wait and start again
}
PREFIX = [(7 * i + 2) % 90 for i in range(9)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=14)
SAMPLED = SamplingParams(temperature=1.0, top_k=40, seed=5, max_tokens=9, n=2)
WORK = [
    (PREFIX, GREEDY),
    ([(3 * i + 1) % 90 for i in range(27)], GREEDY),  # read in chunks
    ([*PREFIX, 3, 1], SAMPLED),  # begins alike, and its samples share a block they write to
    ([4], GREEDY),
]


class Run(NamedTuple):
    tokens: list
    num_preemptions: int
    num_cache_hits: int
    implementation: str
    kv_dtypes: set[str]


def serve(hf: dict[str, Any], **options: Any) -> Run:
    config = ModelConfig.from_hf(hf)
    with LLM(model=config, params=tiny_params(config, 0), **(OPTIONS | options)) as llm:
        prompts, params = zip(*WORK, strict=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens = [[sample.token_ids for sample in output.outputs] for output in outputs]
        again = llm.generate([PREFIX], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert again == tokens[0][0]
        state = llm.engine._device.state
        check_invariants(state)
        return Run(
            tokens=tokens,
            num_preemptions=llm.stats.num_preemptions,
            num_cache_hits=llm.stats.num_cache_hits,
            implementation=llm.snapshot().implementation,
            kv_dtypes={str(kv.k.dtype) for kv in state.kv},
        )


@pytest.fixture
def traced(monkeypatch) -> set[tuple[str, bool]]:
    """The kernels in programs made from now on, and whether they are interpreted."""
    found, pallas_call = set(), pl.pallas_call

    def spy(*args: Any, **options: Any) -> Any:
        found.add((options["name"], options["interpret"]))
        return pallas_call(*args, **options)

    monkeypatch.setattr(pl, "pallas_call", spy)
    return found


@pytest.mark.parametrize(
    "hf",
    [
        pytest.param(LLAMA | {"num_hidden_layers": 1}, id="llama"),
        # Windows, soft caps, norms, one layer of each kind.
        pytest.param(GEMMA2 | {"num_hidden_layers": 2}, id="gemma2", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_xlas_through_all_that_may_happen(hf, traced, caplog):
    """Chunks, prefix hits, copies on write, preemptions, windows of steps, sampling."""
    caplog.set_level("INFO", logger="jpaged")
    wanted = serve(hf, implementation="xla")
    assert not traced
    got = serve(hf, implementation="pallas")
    assert got == wanted._replace(implementation="pallas")
    assert got.num_preemptions > 0
    assert got.num_cache_hits > 0
    assert {name for name, _ in traced} == {
        "kv_write",
        "paged_decode",
        "paged_prefill",
        "block_copy_take",
        "block_copy_put",
    }
    assert all(is_interpreted for _, is_interpreted in traced)
    assert "kernels are xla" in caplog.text
    assert "kernels are pallas, interpreted" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bfloat16", {"dtype": "bfloat16"}),
        ("uint8", {"kv_cache_dtype": "fp8_per_token_head"}),
        ("int8", {"kv_cache_dtype": "int8", "deterministic": True}),
    ],
)
def test_pools_of_any_type_are_served(dtype, options):
    """`serve` asks one prompt twice. Half precision lets tokens differ from XLA's."""
    got = serve(LLAMA, implementation="pallas", **options)
    assert got.kv_dtypes == {dtype}
    if "kv_cache_dtype" in options:
        assert got.tokens == serve(LLAMA, implementation="xla", **options).tokens
