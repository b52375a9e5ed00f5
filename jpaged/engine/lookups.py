"""The waiting list as the scheduler reads it: in order, and no further than it wants to know."""

from collections.abc import Callable, Iterator, Sequence

from jpaged.engine.dispatch import NUM_ADMISSIONS
from jpaged.engine.request import Sample
from jpaged.engine.scheduler import View, Waiting
from jpaged.engine.seq_view import Keys

LookUp = Callable[[Sequence[Sample]], list[View]]


class Lookups:
    """What the prefix cache has for waiting samples, asked for in groups when first needed.

    look_up: views of at most NUM_ADMISSIONS samples. keys: names of the blocks that a sample could
    find in the cache.
    """

    def __init__(
        self, samples: Sequence[Sample], look_up: LookUp, keys: Callable[[Sample], Keys]
    ) -> None:
        self._samples, self._look_up, self._keys = samples, look_up, keys
        self._views: dict[int, View] = {}

    def __iter__(self) -> Iterator[Waiting]:
        for place, sample in enumerate(self._samples):
            yield Waiting(lambda place=place: self.view(place), self._keys(sample))

    def view(self, place: int) -> View:
        """The view of a sample that took a row now."""
        if place not in self._views:
            group = self._samples[place : place + NUM_ADMISSIONS]
            self._views |= dict(enumerate(self._look_up(group), start=place))
        return self._views[place]
