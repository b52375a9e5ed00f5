"""The picture of paging: it shows what the core does now, and what its sentences claim."""

import importlib
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE, FIGURE = ROOT / "docs" / "paging.html", ROOT / "docs" / "paging.svg"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        return importlib.import_module("draw_paging")


@pytest.fixture(scope="module")
def story(script: ModuleType) -> list:
    return script.tell()


@pytest.fixture(scope="module")
def scenes(story: list) -> dict:
    return {scene.title: scene.state for scene in story}


def held(state, row: int) -> list[int]:
    return state.rows.block_table[row, : state.rows.num_blocks[row]].tolist()


def test_files_are_what_the_script_draws(script: ModuleType, story: list):
    for name, text in script.draw_files(story).items():
        assert text == (ROOT / "docs" / name).read_text(encoding="utf-8"), (
            f"docs/{name} is stale: run python scripts/draw_paging.py, and look at it"
        )


@pytest.mark.parametrize("file", [PAGE, FIGURE], ids=lambda file: file.name)
def test_files_are_xml_that_needs_nothing_else(file: Path):
    text = file.read_text(encoding="utf-8")
    tags = {element.tag.rpartition("}")[2] for element in ET.fromstring(text).iter()}
    assert "text" in tags
    assert not tags & {"script", "link", "img", "image", "use", "foreignObject", "iframe"}
    outside = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not [word for word in ("http", "url(", "@import", "src=", "href") if word in outside]


def test_a_prefix_is_shared_and_read_once(scenes: dict):
    before, after = scenes["A prompt is read"], scenes["A second prompt begins alike"]
    assert held(before, 1) == [1, 2, 3]
    assert held(after, 2) == [1, 2]
    assert after.rows.context_len[2] == 8
    assert after.pool.ref_count[[1, 2, 3]].tolist() == [2, 2, 1]
    np.testing.assert_array_equal(before.kv[0].k, after.kv[0].k)


def test_the_first_write_into_a_shared_block_copies_it(scenes: dict, script: ModuleType):
    before, after = scenes["One prompt, two samples"], scenes["Copy on write"]
    assert held(before, 2) == held(before, 3) == [1, 2, 4]
    assert before.pool.ref_count[4] == 2
    assert script.copied_from(after, before) == {5: 4}
    assert sorted([held(after, 2), held(after, 3)]) == [[1, 2, 4], [1, 2, 5]]
    assert after.pool.ref_count[[1, 2, 4, 5]].tolist() == [3, 3, 1, 1]
    assert script.words_in(after, 4)[:1] == script.words_in(after, 5)[:1] == ["snow"]
    assert {script.words_in(after, block)[1] for block in (4, 5)} == {"frozen", "soft"}


def test_a_window_takes_its_blocks_first(scenes: dict, script: ModuleType):
    before, after = scenes["A window reserves ahead"], scenes["The window fills them"]
    for row in (1, 2, 3):
        assert len(held(before, row)) == 4
        assert script.words_in(before, held(before, row)[-1]) == []
        assert script.words_in(after, held(before, row)[-1])
    assert after.rows.active[[1, 2, 3]].tolist() == [False, False, True]


def test_finished_rows_leave_what_they_wrote(scenes: dict, script: ModuleType):
    before, after = scenes["The window fills them"], scenes["Finished rows let go"]
    order = script.order_of_reuse(after)
    is_cached = after.pool.block_hash[order].any(axis=1)
    assert is_cached.tolist() == [False, False, False, True, True]
    assert set(order[:2]) == {held(before, 1)[-1], held(before, 2)[-1]}
    assert held(scenes["A prompt evicts"], 4) == order[:4]
    assert order[3] == 3


def test_a_preempted_row_comes_back_to_its_blocks(scenes: dict, script: ModuleType):
    before, off, back = (
        scenes[title] for title in ("Not enough for two", "Preemption", "And back again")
    )
    first, *full = script.order_of_reuse(off)
    assert [*full[::-1], first] == held(before, 4)  # the last, partly filled block has no key
    assert held(back, 4)[:3] == full[::-1]
    assert back.rows.token_ids[4, :14].tolist() == before.rows.token_ids[4, :14].tolist()
