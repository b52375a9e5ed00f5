"""The file of a run's figures: read, added to row by row, and told as a table.

    {"date": ..., "parts": {NAME: {"rows": [...], "is_done": true}}}

A part that was stopped has the rows that it got to, and is not done.
"""

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HIDDEN = ("case", "heads", "kv_dtype", "rows")  # the name of a row says it


class Results:
    """A file of results. Every change is written at once, and whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        empty = {"date": datetime.date.today().isoformat(), "parts": {}}
        self._told = json.loads(path.read_text("utf-8")) if path.exists() else empty

    @property
    def parts(self) -> dict[str, Any]:
        """By name."""
        return self._told["parts"]

    def rows(self, part: str) -> list[dict[str, Any]]:
        """What a part has told so far."""
        return self.parts.get(part, {}).get("rows", [])

    def is_done(self, part: str) -> bool:
        """Whether a part has run to its end."""
        return self.parts.get(part, {}).get("is_done", False)

    def begin(self, part: str, *, anew: bool) -> None:
        """Starts a part; without `anew` its rows of before stay."""
        rows = [] if anew else [row for row in self.rows(part) if "error" not in row]
        self.parts[part] = {"rows": rows, "is_done": False}
        self._write()

    def add(self, part: str, row: dict[str, Any]) -> None:
        """A row; one of a case that is there is added to it."""
        rows = self.parts[part]["rows"]
        for known in rows:
            if known.get("case") == row.get("case") and not known.keys() & row.keys() - {*_HIDDEN}:
                known.update(row)
                break
        else:
            rows.append(row)
        self._write()

    def finish(self, part: str, seconds: float, error: str | None = None) -> None:
        """Ends a part, which an error leaves undone."""
        self.parts[part] |= {"is_done": error is None, "seconds": round(seconds, 1)}
        if error is not None:
            self.parts[part]["error"] = error
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(self._told, indent=1) + "\n", encoding="utf-8")
        draft.replace(self.path)


def lines_of(part: str, told: dict[str, Any]) -> Iterator[str]:
    """A part's results for a terminal."""
    ending = "" if told["is_done"] else f", not done: {told.get('error', 'it was stopped')}"
    yield f"{part}: {told.get('seconds', '?')} s{ending}"
    for row in told["rows"]:
        figures = {name: value for name, value in row.items() if name not in _HIDDEN}
        texts = []
        for name, value in figures.items():
            if isinstance(value, dict):
                value = ", ".join(f"{key} {one}" for key, one in value.items())
            texts.append(f"{name} {value}")
        yield f"  {row.get('case', ''):34} {'; '.join(texts)}"
