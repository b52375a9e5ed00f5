"""Who waits, who runs, and in which rows: the host's side of admission, preemption and release."""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence

from jpaged.engine.request import Sample


class Roster:
    """The queues, and the rows 1 to `num_rows`. Rows that were left wait for their release."""

    def __init__(self, num_rows: int) -> None:
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        self.leaving: list[int] = []  # rows to be released on the device
        self._num_rows = num_rows
        self._free_rows = list(range(1, num_rows + 1))

    @property
    def num_free_rows(self) -> int:
        """Rows that nobody sits in."""
        return len(self._free_rows)

    def take_rows(self, number: int) -> list[int]:
        """The lowest free rows."""
        return [heapq.heappop(self._free_rows) for _ in range(number)]

    def give_back(self, row_ids: Iterable[int]) -> None:
        """Rows that are empty, on the device too."""
        for row_id in row_ids:
            heapq.heappush(self._free_rows, row_id)

    def seat(self, samples: Sequence[Sample]) -> None:
        """Moves samples from the waiting to the running, and gives them rows."""
        chosen = {id(sample) for sample in samples}
        self.waiting = deque(s for s in self.waiting if id(s) not in chosen)
        for sample in samples:
            sample.row_ids = self.take_rows(sample.num_rows)
        self.running.extend(samples)

    def leave(self, sample: Sample) -> None:
        """Takes a sample off the running."""
        self.running.remove(sample)
        self.leaving.extend(sample.row_ids)
        sample.leave_row()

    def preempt(self, sample: Sample) -> None:
        """Sends a running sample back, before all others that wait."""
        self.leave(sample)
        self.waiting.appendleft(sample)

    def drop(self, samples: Iterable[Sample]) -> None:
        """Takes samples off both queues."""
        gone = {id(sample) for sample in samples}
        for sample in [s for s in self.running if id(s) in gone]:
            self.leave(sample)
        self.waiting = deque(s for s in self.waiting if id(s) not in gone)

    def restart(self) -> None:
        """After the loss of the device state: who ran waits again, and all rows are free."""
        for sample in self.running:
            sample.leave_row()
        unfinished = [sample for sample in self.running if sample.finish_reason is None]
        self.waiting, self.running = deque([*unfinished, *self.waiting]), []
        self._free_rows, self.leaving = list(range(1, self._num_rows + 1)), []
