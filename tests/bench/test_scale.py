"""The parts of benchmarks/scale.py on a tiny model: what they count agrees, and it can be drawn."""

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks import host_time, scale
from tests.bench.test_throughput import MODEL

SMALL = scale.Sizes(
    rows=(1, 4),
    context=64,
    contexts=(48, 64),
    context_rows=4,
    host_rows=4,
    host_requests=6,
    host_len=16,
    rounds=1,
)
"""Of equal sizes, so that the parts share their programs."""

TOKENIZER = MODEL.parent.parent / "tokenizer"
OPTIONS = {"dtype": "float32"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What each part finds."""
    model = tmp_path_factory.mktemp("model")
    for file in [*MODEL.glob("*"), *TOKENIZER.glob("tokenizer*")]:
        shutil.copy(file, model)
    return {name: part(str(model), OPTIONS, SMALL) for name, part in scale.PARTS.items()}


def test_speeds_follow_from_times(found: dict):
    lines = found["batch"]["lines"]
    assert [line["rows"] for line in lines] == [1, 4]
    for line in lines:
        speed = line["rows"] / line["step_ms"] * 1e3
        assert line["output_tokens_per_s"] == pytest.approx(speed, rel=0.1)  # of rounded ms
    assert found["batch"]["max_num_seqs"] == 4


def test_each_context_has_its_costs(found: dict):
    lines = found["context"]["lines"]
    assert [line["context"] for line in lines] == [48, 64]
    assert min(line[key] for line in lines for key in ("decoded_token_ms", "prompt_token_ms")) > 0


@pytest.mark.parametrize("part", ["host", "stream"])
def test_the_host_and_its_stages_agree(found: dict, part: str):
    """Where a device has next to nothing to do, the host's share is large, and no stage is out."""
    one = found[part]
    assert sum(one["stages"].values()) == pytest.approx(one["host_share"], abs=1e-3)
    assert 0 < one["host_share"] < 1
    assert one["stages"]["detokenize"] > 0
    assert one["num_programs_while_measured"] == 0
    assert (one["readers"] > 0) == (one["stages"]["tell"] > 0) == (part == "stream")
    assert one["tokens"] >= 4 * one["engine_steps"]


def test_what_waits_and_what_is_nested_is_told_apart(monkeypatch: pytest.MonkeyPatch):
    now = iter(range(100))
    monkeypatch.setattr(host_time.time, "perf_counter", lambda: next(now))
    clock = host_time.StageClock(rows=1)
    clock._thread = host_time.threading.get_ident()
    inner = clock._timed("wait", lambda: None)
    clock._timed("plan", lambda: [inner(), inner()])()
    # The clock ticks at each look: 0 [1 2] [3 4] 5.
    assert clock.all_seconds == {"wait": 2, "plan": 3}


def test_prompts_end_a_token_behind_full_blocks():
    for context in scale.Sizes().contexts:
        length = scale.prompt_len(context)
        assert length % scale.BLOCK_SIZE == 1
        num_decoded = 1 + 8 * scale.NUM_WINDOWS
        assert context - 2 * scale.BLOCK_SIZE < length + num_decoded <= context


def test_the_figure_and_its_tables(found: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    for part, result in found.items():
        (tmp_path / f"scale_{part}.json").write_text(json.dumps(result))
    figure = tmp_path / "scale.svg"
    scale.main(["--part", "plot", "--results", str(tmp_path), "--figure", str(figure)])
    text = "".join(ET.fromstring(figure.read_text(encoding="utf-8")).itertext())
    assert "Output tokens/s, context 64" in text
    assert "detokenize" in text
    printed = capsys.readouterr().out
    assert f"| 4 | {found['batch']['lines'][1]['step_ms']} |" in printed
    assert f"| streamed | {found['stream']['host_share']:.1%} |" in printed
