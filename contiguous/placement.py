"""Where in an arena an interval of slots goes: first fit, best fit or buddy blocks."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator

from .arena import Placement
from .buddy import Buddy


class Intervals(Placement):
    """Free intervals of any size, merged with their neighbours at once.

    Two sorted lists, by address and by (size, address), so that every look-up is a bisection
    and the largest is at the end; a step costs O(log n) comparisons and one memory move.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.num_free = capacity
        self._size_of = {0: capacity}
        self._starts = [0]
        self._by_size = [(capacity, 0)]

    @property
    def largest(self) -> int:
        """The whole arena."""
        return self._capacity

    @property
    def largest_free(self) -> int:
        """The longest free interval; 0 if nothing is free."""
        return self._by_size[-1][0] if self._by_size else 0

    @abstractmethod
    def _choose(self, size: int) -> int:
        """Start of the free interval to cut from; one that is large enough exists."""

    def take(self, size: int) -> int | None:
        """Cut ``size`` slots from the front of the interval that the placement chooses."""
        if size > self.largest_free:
            return None
        start = self._choose(size)
        self._cut(start, size)
        return start

    def extend(self, start: int, held: int, size: int) -> int | None:
        """Take the slots behind the interval, if enough of them are free; None if not."""
        extra = size - held
        if self._size_of.get(start + held, 0) < extra:
            return None
        self._cut(start + held, extra)
        return size

    def give_back(self, start: int, held: int) -> None:
        """Free an interval; it merges with its neighbours, found by bisection."""
        at = bisect_left(self._starts, start)
        before = self._starts[at - 1] if at else None
        after = self._starts[at] if at < len(self._starts) else None
        assert before is None or before + self._size_of[before] <= start, "slots freed twice"
        assert after is None or start + held <= after, "slots freed twice"
        self.num_free += held
        if after is not None and after == start + held:
            held += self._forget(after, at)
        if before is not None and before + self._size_of[before] == start:
            held += self._forget(before, at - 1)
            start, at = before, at - 1
        self._starts.insert(at, start)
        self._size_of[start] = held
        insort(self._by_size, (held, start))

    def trim(self, start: int, held: int, size: int) -> None:
        """Free all slots behind the first ``size``."""
        self.give_back(start + size, held - size)

    def _cut(self, start: int, size: int) -> None:
        """Take the first ``size`` slots of a free interval."""
        at = bisect_left(self._starts, start)
        rest = self._forget(start, at) - size
        if rest:
            self._starts.insert(at, start + size)
            self._size_of[start + size] = rest
            insort(self._by_size, (rest, start + size))
        self.num_free -= size

    def _forget(self, start: int, at: int) -> int:
        """Drop the free interval at ``start``, number ``at`` by address; its size."""
        size = self._size_of.pop(start)
        del self._starts[at]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size

    def free_intervals(self) -> Iterator[tuple[int, int]]:
        """``(start, size)`` of the free intervals, by address."""
        return ((start, self._size_of[start]) for start in self._starts)

    def check(self) -> None:
        """Raise ``AssertionError`` if the two lists differ, overlap or miscount."""
        assert sorted(self._size_of) == self._starts, "free intervals differ between the lists"
        assert sorted((size, start) for start, size in self._size_of.items()) == self._by_size
        assert sum(self._size_of.values()) == self.num_free, "free slots are miscounted"
        end = -1
        for start, size in self.free_intervals():
            assert start > end and size > 0, "free intervals overlap or are not merged"
            end = start + size
        assert end <= self._capacity, "a free interval passes the end of the arena"


class FirstFit(Intervals):
    """The lowest address that is large enough."""

    def _choose(self, size: int) -> int:
        return next(start for start in self._starts if self._size_of[start] >= size)


class BestFit(Intervals):
    """The smallest free interval that is large enough, the lowest address among equals."""

    def _choose(self, size: int) -> int:
        return self._by_size[bisect_left(self._by_size, (size, 0))][1]


PLACEMENTS: dict[str, type[FirstFit | BestFit | Buddy]] = {
    "first-fit": FirstFit,
    "best-fit": BestFit,
    "buddy": Buddy,
}
