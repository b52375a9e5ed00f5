"""When a request's tokens were there, and the latencies that follow, under vLLM's names.

ttft: time to first token, from when a request was due. e2el: end-to-end latency. tpot: time per
output token of a sample after its first. itl: inter-token latency, the time between two outputs of
a sample; where an output brings several tokens, as a window of steps does, it is longer than tpot.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

NAMES = ("ttft", "tpot", "itl", "e2el")
_PERCENTILES = {"median": 50, "p90": 90, "p99": 99}


class _Mark(NamedTuple):
    """An output of a sample."""

    time: float
    num_tokens: int  # so far


@dataclasses.dataclass
class RequestTimes:
    """The outputs of a request as they came. due: when it should start, as `time.perf_counter`."""

    due: float
    _marks: dict[int, list[_Mark]] = dataclasses.field(default_factory=dict)

    def add(self, index: int, num_new: int, now: float) -> None:
        """Sample `index` has `num_new` more tokens; none is no output."""
        if num_new:
            total = self.num_tokens_of(index) + num_new
            self._marks.setdefault(index, []).append(_Mark(now, total))

    def num_tokens_of(self, index: int) -> int:
        """Tokens of a sample so far."""
        marks = self._marks.get(index)
        return marks[-1].num_tokens if marks else 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(map(self.num_tokens_of, self._marks))

    @property
    def latencies(self) -> dict[str, list[float]]:
        """Seconds, by name: one ttft and e2el, a tpot for each sample, an itl for each output after
        a sample's first. All are empty if nothing came, as of a model that gives NaN."""
        samples = list(self._marks.values())
        if not samples:
            return {name: [] for name in NAMES}
        return {
            "ttft": [min(marks[0].time for marks in samples) - self.due],
            "tpot": [
                (marks[-1].time - marks[0].time) / (marks[-1].num_tokens - marks[0].num_tokens)
                for marks in samples
                if len(marks) > 1
            ],
            "itl": [
                later.time - earlier.time for marks in samples for earlier, later in pairwise(marks)
            ],
            "e2el": [max(marks[-1].time for marks in samples) - self.due],
        }

    def meets(self, goals: Mapping[str, float]) -> bool:
        """Whether something came, and no latency exceeds its goal, in ms; the slowest sample
        counts."""
        latencies = self.latencies
        return bool(self._marks) and all(
            max(latencies[name], default=0.0) * 1e3 <= limit for name, limit in goals.items()
        )


def summarize(requests: Sequence[RequestTimes]) -> dict[str, Any]:
    """Median, 90th and 99th percentile of each latency, in ms: `median_ttft_ms` and so on."""
    latencies = [request.latencies for request in requests]
    return {
        f"{word}_{name}_ms": _percentile([x for one in latencies for x in one[name]], percent)
        for name in NAMES
        for word, percent in _PERCENTILES.items()
    }


def _percentile(seconds: Sequence[float], percent: float) -> float | None:
    """In ms; None if there is nothing, as between the tokens of a single one."""
    return round(float(np.percentile(seconds, percent)) * 1e3, 3) if seconds else None
