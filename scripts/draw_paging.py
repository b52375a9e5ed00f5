"""Draws docs/paging.html and docs/paging.svg from the recorded run of `paging_story.py`.

python scripts/draw_paging.py [DIRECTORY]

A panel shows one state: at the left the rows, their block tables and their words; at the right the
pool of blocks, with the words found in the KV pages. It is compared with the state before to mark
what is new. The HTML is well-formed XML, and needs no other file.
"""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
from paging_story import BLOCK_SIZE, NAMES, NUM_BLOCKS, WORDS, Scene, tell

from jpaged.core.block_pool import eviction_key, is_hashed
from jpaged.core.state import EngineState
from jpaged.ops.kv_cache import NULL_BLOCK

PITCH, TOP = 88, 30  # of rows of blocks, and of the first
CELL_W, CELL_H, GAP = 48, 17, 6
BOX_W, BOX_H = 2 * CELL_W, 2 * CELL_H
LEFT, GUTTER = 8, 60  # where rows begin, and what is between them and the pool
POOL_COLUMNS, ROW_COLUMNS = 3, 5
PANEL_H = TOP + PITCH * 3
ORDINALS = ("st", "nd", "rd", "th")

LIGHT = {
    "card": "#ffffff",
    "ink": "#1f2328",
    "dim": "#656d76",
    "line": "#8c959f",
    "new": "#fff0a8",
    "row1": "#cfe3fb",
    "row2": "#ffdfb5",
    "row3": "#c8ebc9",
    "row4": "#e6d6f8",
}
DARK = {
    "card": "#0d1117",
    "ink": "#e6edf3",
    "dim": "#9198a1",
    "line": "#656c76",
    "new": "#5a4b00",
    "row1": "#1b4275",
    "row2": "#6b4000",
    "row3": "#1c5427",
    "row4": "#492b75",
}
FONTS = """
svg text { font: 12px system-ui, sans-serif; }
svg .word { font: 11.5px ui-monospace, Menlo, Consolas, monospace; text-anchor: middle; }
svg .small { font-size: 11px; font-weight: normal; }
svg .id { font-weight: bold; }
svg .end { text-anchor: end; }
svg .middle { text-anchor: middle; }
svg .heading { font-size: 14px; font-weight: bold; }
svg .pending { font-style: italic; }
svg .box, svg .free, svg .mark, svg .pointer { fill: none; }
svg .free { stroke-dasharray: 4 3; }
svg .mark { stroke-width: 2; }
"""
COLOURS = """
svg text, svg circle { fill: INK; }
svg .pale { fill: DIM; }
svg .card { fill: CARD; }
svg .box, svg .free { stroke: LINE; }
svg .mark, svg .pointer { stroke: INK; }
svg .new { fill: NEW; }
svg .row1 { fill: ROW1; }
svg .row2 { fill: ROW2; }
svg .row3 { fill: ROW3; }
svg .row4 { fill: ROW4; }
"""
PAGE_FONTS = """
body { max-width: 886px; margin: 24px auto; padding: 0 7px; font: 16px/1.5 system-ui, sans-serif; }
h2 { margin: 40px 0 4px; font-size: 20px; }
p { margin: 4px 0 12px; }
svg { width: 100%; height: auto; }
code { font: 14px ui-monospace, Menlo, Consolas, monospace; }
"""
PAGE_COLOURS = "body { background: CARD; color: INK; }"


def paint(colours: str) -> str:
    """The style with its colours filled in, for light screens and for dark ones."""

    def filled(palette: dict[str, str]) -> str:
        text = colours
        for name, colour in palette.items():
            text = text.replace(name.upper(), colour)
        return text

    return f"{filled(LIGHT)}@media (prefers-color-scheme: dark) {{{filled(DARK)}}}\n"


def add(parent: ET.Element, tag: str, text: str | None = None, **attributes: object) -> ET.Element:
    """A new element; `class_` stands for a name that Python can not spell."""
    values = {name.rstrip("_"): str(value) for name, value in attributes.items()}
    element = ET.SubElement(parent, tag, values)
    element.text = text
    return element


def rect(parent: ET.Element, class_: str, x: float, y: float, width: float, height: float) -> None:
    """A rectangle."""
    add(parent, "rect", class_=class_, x=x, y=y, width=width, height=height)


# ---- what a state says ----


def holders(state: EngineState, block: int) -> list[int]:
    """The rows whose tables name the block."""
    return [row for row in NAMES if block in state.rows.block_table[row]]


def words_in(state: EngineState, block: int) -> list[str]:
    """The words whose KV the block holds, read from the pages; none if nobody can find them."""
    rows = state.rows
    num_words = BLOCK_SIZE if is_hashed(state.pool)[block] else 0
    for row in holders(state, block):
        column = rows.block_table[row].tolist().index(block)
        num_words = max(num_words, min(rows.context_len[row] - column * BLOCK_SIZE, BLOCK_SIZE))
    return [WORDS[int(word)] for word in state.kv[0].k[block, :num_words].ravel()]


def order_of_reuse(state: EngineState) -> list[int]:
    """Free blocks, the next to be taken first."""
    order = np.argsort(eviction_key(state.pool), stable=True)
    return [int(block) for block in order if state.pool.ref_count[block] == 0]


def copied_from(state: EngineState, before: EngineState) -> dict[int, int]:
    """Blocks that came into a table in place of another, and that other."""
    now, old = state.rows.block_table, before.rows.block_table
    is_copy = (now != old) & (now != NULL_BLOCK) & (old != NULL_BLOCK)
    return dict(zip(now[is_copy].tolist(), old[is_copy].tolist(), strict=True))


# ---- how it looks ----


def draw_words(parent: ET.Element, words: list[tuple[str, str]], x: float, y: float) -> None:
    """Up to 4 (class, word), two on a line."""
    for i, (class_, word) in enumerate(words):
        at = x + (i % 2 + 0.5) * CELL_W, y + i // 2 * CELL_H + 12.5
        add(parent, "text", word, class_=f"word {class_}".strip(), x=at[0], y=at[1])


def draw_row(svg: ET.Element, scene: Scene, before: Scene, row: int, y: float) -> None:
    """A row: what it is, its block table, its words. Those without KV are pale."""
    rows = scene.state.rows
    num_tokens, context_len = int(rows.num_tokens[row]), int(rows.context_len[row])
    label = f"row {row}: {NAMES[row]} "
    text = add(svg, "text", label, class_="id", x=LEFT, y=y + 10)
    add(text, "tspan", f" {context_len} of {num_tokens} words have KV", class_="small pale")
    for column in range(max(-(-num_tokens // BLOCK_SIZE), int(rows.num_blocks[row]))):
        x, block = LEFT + column * (BOX_W + GAP), int(rows.block_table[row, column])
        if block != NULL_BLOCK:
            rect(svg, f"row{row}", x, y + 16, BOX_W, 18)
            add(svg, "text", f"block {block}", class_="id middle", x=x + CELL_W, y=y + 29)
            if block != before.state.rows.block_table[row, column]:
                rect(svg, "mark", x, y + 16, BOX_W, 18)
        rect(svg, "box" if block != NULL_BLOCK else "free", x, y + 34, BOX_W, BOX_H)
        positions = range(column * BLOCK_SIZE, min((column + 1) * BLOCK_SIZE, num_tokens))
        words = [
            ("" if p < context_len else "pending pale", WORDS[rows.token_ids[row, p]])
            for p in positions
        ]
        draw_words(svg, words, x, y + 34)


def draw_block(
    svg: ET.Element, scene: Scene, before: Scene, block: int, x: float, y: float
) -> None:
    """A block of the pool: its holders' colours, its words (new ones marked), its fate."""
    state = scene.state
    words, had = words_in(state, block), words_in(before.state, block)
    held_by = holders(state, block)
    for i, row in enumerate(held_by):
        width = BOX_W / len(held_by)
        rect(svg, f"row{row}", x + i * width, y, width, 18)
    if held_by:
        note = f"{len(held_by)} holder" + "s" * (len(held_by) > 1)
    else:
        turn = order_of_reuse(state).index(block)
        note = f"{turn + 1}{ORDINALS[min(turn, 3)]} in line"
    add(svg, "text", str(block), class_="id", x=x + 5, y=y + 13)
    add(svg, "text", note, class_="end small" + " pale" * (not held_by), x=x + BOX_W - 5, y=y + 13)
    for i, word in enumerate(words):
        if word != "".join(had[i : i + 1]):
            rect(svg, "new", x + i % 2 * CELL_W, y + 18 + i // 2 * CELL_H, CELL_W, CELL_H)
    draw_words(svg, [("" if held_by else "pale", word) for word in words], x, y + 18)
    rect(svg, "box" if held_by else "free", x, y, BOX_W, BOX_H + 18)
    draw_fate(svg, scene, before, block, x, y + BOX_H + 30)


def draw_fate(svg: ET.Element, scene: Scene, before: Scene, block: int, x: float, y: float) -> None:
    """The line below a block."""
    copies = copied_from(scene.state, before.state)
    is_cached, is_held = is_hashed(scene.state.pool)[block], scene.state.pool.ref_count[block] > 0
    states = ["cached"] * bool(is_cached) + ["free"] * (not is_held)
    text = f"copied from {copies[block]}" if block in copies else ", ".join(states)
    add(svg, "text", text, class_="id" if block in copies else "small pale", x=x + 2, y=y)


def place_of(block: int, num_columns: int) -> tuple[float, float]:
    """Where a block of the pool is drawn, beside rows of so many boxes."""
    column, line = (block - 1) % POOL_COLUMNS, (block - 1) // POOL_COLUMNS
    start = LEFT + num_columns * (BOX_W + GAP) + GUTTER
    return start + column * (BOX_W + GAP), TOP + 16 + line * PITCH


def draw_pointer(svg: ET.Element, scene: Scene, row: int, y: float, num_columns: int) -> None:
    """A line from the last entry of a row's table to its block, around the blocks in between."""
    last = int(scene.state.rows.num_blocks[row]) - 1
    block = int(scene.state.rows.block_table[row, last])
    pool_x, _ = place_of(1, num_columns)
    x, end_y = place_of(block, num_columns)
    start = LEFT + last * (BOX_W + GAP) + BOX_W
    path = f"M {start} {y} H {pool_x - GUTTER} C {pool_x - 20} {y} {pool_x - 40}"
    if x == pool_x:
        end = x, end_y + 9
        path += f" {end[1]} {end[0]} {end[1]}"
    else:
        end = x + 26, end_y
        lane = end_y - 5 - (x - pool_x) / (BOX_W + GAP) * 4
        path += f" {lane} {pool_x} {lane} H {end[0]} V {end_y}"
    add(svg, "path", class_="pointer", d=path)
    add(svg, "circle", cx=end[0], cy=end[1], r=3)


def draw_panel(svg: ET.Element, scene: Scene, before: Scene, num_columns: int) -> None:
    """One state, beside which the state before is known."""
    add(svg, "text", "rows and their block tables", class_="small pale", x=LEFT, y=16)
    x, _ = place_of(1, num_columns)
    add(svg, "text", "the pool, and the words whose KV it holds", class_="small pale", x=x, y=16)
    for block in range(1, NUM_BLOCKS):
        draw_block(svg, scene, before, block, *place_of(block, num_columns))
    seated = [row for row in NAMES if scene.state.rows.num_tokens[row] > 0]
    for place, row in enumerate(seated):
        draw_row(svg, scene, before, row, TOP + place * PITCH)
        draw_pointer(svg, scene, row, TOP + place * PITCH + 25, num_columns)
    if not seated:
        add(svg, "text", "no rows", class_="pale", x=LEFT, y=TOP + 28)


def panel_width(num_columns: int) -> float:
    """Of a panel whose rows have at most so many boxes."""
    return place_of(POOL_COLUMNS, num_columns)[0] + BOX_W + LEFT


def new_svg(width: float, height: float, label: str) -> ET.Element:
    """An empty picture."""
    return ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width} {height}",
            "role": "img",
            "aria-label": label,
        },
    )


def draw_figure(scenes: list[Scene]) -> ET.Element:
    """The fork and the copy on write, one above the other."""
    at = next(i for i, scene in enumerate(scenes) if scene.title == "Copy on write")
    captions = (
        "Before: rows 2 and 3 are samples of one prompt and share all blocks, block 4 too.",
        "After: they went on with different words. The first write into block 4 copied it.",
    )
    num_columns = 3
    width, height = panel_width(num_columns), 2 * PANEL_H + 60
    svg = new_svg(width, height, " ".join(captions))
    svg.set("width", str(width))
    svg.set("height", str(height))
    add(svg, "style", FONTS + paint(COLOURS))
    rect(svg, "card", 0, 0, width, height)
    for i, caption in enumerate(captions):
        y = i * (PANEL_H + 30)
        add(svg, "text", caption, class_="heading", x=LEFT, y=y + 22)
        panel = add(svg, "g", transform=f"translate(0 {y + 28})")
        draw_panel(panel, scenes[at - 1 + i], scenes[at - 2 + i], num_columns)
    return svg


INTRODUCTION = """<p>This page shows a run of jpaged's core, move by move, at a size to read:
blocks of 4 words, a pool of 9 blocks, rows of at most 28 words. The functions are those that serve
a real model; the model here is a toy that knows four sentences. Everything drawn was read from the
engine's state by <code>scripts/draw_paging.py</code>.</p>"""
LEGEND = """<p>The colours in a block's head are the rows that hold it. Yellow words were written in
this move, and framed entries of a block table are new. A line leads from a row's last entry to its
block. Pale words of a row are known, but have no KV yet. <i>Cached</i> blocks can be found by what
they hold. Dashed blocks are free, and stand in line for their next use.</p>"""


def draw_page(scenes: list[Scene]) -> ET.Element:
    """All panels, each with what happened in it."""
    html = ET.Element("html", {"lang": "en"})
    head = add(html, "head")
    add(head, "meta", charset="utf-8")
    add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    add(head, "title", "Paging, step by step")
    add(head, "style", FONTS + PAGE_FONTS + paint(COLOURS + PAGE_COLOURS))
    body = add(html, "body")
    add(body, "h1", "Paging, step by step")
    body.extend([ET.fromstring(INTRODUCTION), ET.fromstring(LEGEND)])
    for i, scene in enumerate(scenes):
        add(body, "h2", f"{i + 1}. {scene.title}")
        svg = new_svg(panel_width(ROW_COLUMNS), PANEL_H, scene.title)
        draw_panel(svg, scene, scenes[max(i - 1, 0)], ROW_COLUMNS)
        body.append(svg)
        body.append(ET.fromstring(f"<p>{scene.text}</p>"))
    return html


def as_text(root: ET.Element) -> str:
    """XML, an element a line where it does not matter to the reader."""
    ET.indent(root, " ")
    return ET.tostring(root, encoding="unicode") + "\n"


def draw_files(scenes: list[Scene]) -> dict[str, str]:
    """What is written, by the names of the files."""
    page = "<!DOCTYPE html>\n" + as_text(draw_page(scenes))
    return {"paging.html": page, "paging.svg": as_text(draw_figure(scenes))}


def main() -> None:
    """Writes the files."""
    directory = Path(*sys.argv[1:2] or ["docs"])
    for name, text in draw_files(tell()).items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
