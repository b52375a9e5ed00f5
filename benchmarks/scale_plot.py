"""Draws what `benchmarks.scale` has measured, and prints the tables of docs/performance.md."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

GOAL = 0.05  # of a step, below which the host's share is to stay
BLUE, ORANGE, GREY = "#1f6fb2", "#d9822b", "#8a8a8a"
STAGE_COLORS = ("#1f6fb2", "#7fb3d9", "#d9822b", "#f0bd85", "#4f9d69", "#a6cfae", "#8a8a8a")
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "jpaged",  # equal figures, equal files
}


def draw(found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Three figures side by side, as SVG. found: by part, what it has left."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 3.2), layout="constrained")
        batch, context, host = figure.subplots(1, 3)
        draw_batch(batch, found["batch"])
        draw_context(context, found["context"])
        draw_host(host, [found["stream"], found["host"]])
        figure.savefig(path, format="svg", metadata={"Date": None})
    print(*tables(found), sep="\n")


def draw_batch(axes: Axes, found: Mapping[str, Any]) -> None:
    rows = [line["rows"] for line in found["lines"]]
    speeds = [line["output_tokens_per_s"] for line in found["lines"]]
    axes.plot(rows, speeds, "o-", color=BLUE)
    for x, y in zip(rows, speeds, strict=True):
        axes.annotate(f"{y:,.0f}", (x, y), (-3, 5), textcoords="offset points", ha="center")
    _log_axes(axes, rows)
    axes.set_ylim(speeds[0] / 1.5, max(speeds) * 2)
    axes.set(title=f"Output tokens/s, context {found['context']}", xlabel="rows")


def draw_context(axes: Axes, found: Mapping[str, Any]) -> None:
    contexts = [line["context"] for line in found["lines"]]
    first = found["lines"][0]
    for key, label, color in (
        ("decoded_token_ms", "a decoded token", BLUE),
        ("prompt_token_ms", "a prompt token", ORANGE),
    ):
        axes.plot(contexts, [line[key] for line in found["lines"]], "o-", color=color, label=label)
    ideal = [first["decoded_token_ms"] * context / contexts[0] for context in contexts]
    axes.plot(contexts, ideal, "--", color=GREY, label="as fast as the context")
    _log_axes(axes, contexts)
    axes.legend(frameon=False, loc="upper left")
    axes.set(title=f"ms of a token, {found['rows']} rows", xlabel="context")


def draw_host(axes: Axes, found: list[Mapping[str, Any]]) -> None:
    """Bars of what is the host's own, by stages."""
    stages = dict.fromkeys(name for one in found for name in one["stages"])
    left = [0.0] * len(found)
    labels = [f"texts\n{one['texts']}" for one in found]
    for stage, color in zip(stages, STAGE_COLORS, strict=False):
        shares = [one["stages"].get(stage, 0.0) * 100 for one in found]
        axes.barh(labels, shares, 0.5, left=left, color=color, label=stage)
        left = [x + share for x, share in zip(left, shares, strict=True)]
    axes.axvline(GOAL * 100, 0, 0.7, linestyle="--", color=GREY)
    axes.set_xlim(0, max(*left, GOAL * 100) * 1.1)
    axes.set_ylim(-0.5, len(found) + 0.6)  # room for the legend
    axes.grid(visible=False, axis="y")
    axes.legend(frameon=False, ncols=3, loc="upper center", fontsize=8, columnspacing=1)
    axes.set(title=f"The host's own time, {found[0]['rows']} rows", xlabel="% of a step")


def _log_axes(axes: Axes, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def tables(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown."""
    batch = [
        [line["rows"], line["step_ms"], line["output_tokens_per_s"]]
        for line in found["batch"]["lines"]
    ]
    lines = found["context"]["lines"]
    context = [
        [
            f"{line['context']:,}",
            line["decoded_token_ms"],
            f"{line['decoded_token_ms'] / lines[0]['decoded_token_ms']:.2f}",
            f"{line['context'] / lines[0]['context']:.0f}",
            line["prompt_token_ms"],
        ]
        for line in lines
    ]
    parts = [found["host"], found["stream"]]
    stages = dict.fromkeys(name for one in parts for name in one["stages"])
    host = [
        [one["texts"], f"{one['host_share']:.1%}"]
        + [f"{one['stages'].get(name, 0.0):.2%}" for name in stages]
        + [f"{one['readers']:.2%}"]
        for one in parts
    ]
    return [
        *_table(["rows", "step, ms", "output tokens/s"], batch),
        *_table(["context", "decoded, ms", "times the first", "context", "prompt, ms"], context),
        *_table(["texts", "host", *stages, "readers"], host),
    ]


def _table(head: list[str], rows: list[list[Any]]) -> list[str]:
    lines = [head, ["---:"] * len(head), *rows]
    return ["", *(f"| {' | '.join(map(str, line))} |" for line in lines)]
