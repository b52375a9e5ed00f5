"""The kernel benchmark on tiny shapes: a line for each case, and figures that agree."""

import json
import shutil

import pytest

from jpaged import cli, errors
from jpaged.bench import kernels
from jpaged.bench.kernels import AttentionCase, Shape
from jpaged.model_config import ModelConfig
from tests.bench.test_throughput import MODEL
from tests.engine.counting import MODEL as COUNTING_MODEL

TINY = Shape(
    num_heads=4, num_kv_heads=2, head_dim=8, hidden_size=16, intermediate_size=24, vocab_size=40
)
CASES = (
    AttentionCase("decode", [(20, 1), (3, 1)]),
    AttentionCase("prefill", [(20, 5), (3, 3)], is_decode=False),
)


@pytest.fixture(scope="module")
def lines() -> list:
    rest = {"num_rows": (2,), "cold_bytes": 10_000}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "MIN_SECONDS", 0)
        return list(kernels.measure(TINY, dtype="float32", reps=3, cases=CASES, **rest))


def test_a_line_for_each_case(lines: list):
    assert [(line["op"], line["case"]) for line in lines] == [
        ("paged_attention", "decode"),
        ("paged_attention", "prefill"),
        *(("linear", f"{name}, 2 rows") for name in ("qkv", "o", "gate_up", "down", "head")),
    ]
    assert lines == json.loads(json.dumps(lines))


def test_figures_agree(lines: list):
    decode, prefill, qkv = lines[:3]
    assert decode["heads"] == [4, 2, 8]
    assert qkv["weight"] == [16, 64]
    # Bytes: keys and values of 23 positions, queries and results; a weight, its rows and results.
    sizes = ((decode, 2 * 23 * 16 + 2 * 2 * 32), (prefill, 2 * 23 * 16 + 2 * 8 * 32))
    for line, num_floats in (*sizes, (qkv, 16 * 64 + 2 * (16 + 64))):
        read = line["gb_per_s"]["xla"] * line["ms"]["xla"] * 1e6
        assert read == pytest.approx(4 * num_floats, rel=2e-3)
        assert line["times_as_fast"]["xla"] == 1
    for name, ms in qkv["ms"].items():
        assert qkv["gflop_per_s"][name] * ms * 1e6 == pytest.approx(2 * 2 * 16 * 64, rel=2e-3)
    # Queries see 16 to 20 and 1 to 3 positions.
    assert [case.num_pairs for case in CASES] == [23, 90 + 6]
    assert set(decode["ms"]) == set(prefill["ms"]) <= {"xla", "native"}


def test_native_kernels_take_part_where_they_load(lines: list):
    from jpaged.native import build

    try:
        build.find_compiler()
    except errors.NativeUnavailableError as reason:
        pytest.skip(str(reason))
    assert list(lines[0]["ms"]) == ["xla", "native"]
    qkv = lines[2]
    assert list(qkv["ms"]) == ["xla", "native", "native int8", "native int4"]
    sizes = {name: qkv["gb_per_s"][name] * ms for name, ms in qkv["ms"].items()}
    assert sizes["native int4"] < sizes["native int8"] < sizes["native"]


def test_the_shapes_are_a_models(monkeypatch, capsys, tmp_path):
    seen = []
    shutil.copy(MODEL / "config.json", tmp_path)  # without weights

    def measure(shape, **options):
        seen.append((shape, options))
        yield {"case": "one"}

    monkeypatch.setattr(kernels, "measure", measure)
    assert cli.main(["bench", "kernels", "--model", str(tmp_path), "--dtype", "float32"]) == 0
    assert json.loads(capsys.readouterr().out) == {"workload": None, "case": "one"}
    ((shape, options),) = seen
    assert options == {"dtype": "float32", "reps": 20}
    assert shape.hidden_size == json.loads((MODEL / "config.json").read_text())["hidden_size"]
    assert isinstance(COUNTING_MODEL, ModelConfig)
    assert Shape.of(COUNTING_MODEL).intermediate_size == 8
