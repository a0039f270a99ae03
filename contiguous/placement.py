"""Where in an arena an interval of slots goes: first fit, best fit or buddy blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator


class Placement(ABC):
    """The free intervals of slots ``0 … capacity − 1``. All sizes are in slots."""

    num_free: int
    """Slots in no interval that was taken."""

    def rounded(self, size: int) -> int:
        """Slots that an interval for ``size`` slots really holds."""
        return size

    @property
    @abstractmethod
    def largest(self) -> int:
        """The largest interval that an empty arena offers."""

    @property
    @abstractmethod
    def largest_free(self) -> int:
        """The largest interval that can be taken now; 0 if none."""

    @abstractmethod
    def take(self, size: int) -> int | None:
        """Take ``rounded(size)`` slots, ``size`` at least 1; their start, or None if none fits."""

    @abstractmethod
    def extend(self, start: int, held: int, size: int) -> int | None:
        """Make the interval ``[start, start + held)`` larger in place, to at least ``size``.

        Returns what it holds now, or None, with nothing changed, where the slots behind it
        are not free.
        """

    @abstractmethod
    def give_back(self, start: int, held: int) -> None:
        """Free an interval that was taken, whole; it merges with free neighbours."""

    @abstractmethod
    def trim(self, start: int, held: int, size: int) -> None:
        """Free the end of an interval that was taken; ``rounded(size)`` slots stay."""

    @abstractmethod
    def free_intervals(self) -> Iterator[tuple[int, int]]:
        """``(start, size)`` of the free intervals, by address."""

    @abstractmethod
    def check(self) -> None:
        """Raise ``AssertionError`` if the free intervals contradict each other."""


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


class Buddy(Placement):
    """Blocks of power-of-two size at multiples of their size (Knowlton 1965).

    A capacity that is no power of two is cut into the powers of its binary form, largest
    first. Each starts at a multiple of twice its size, so its own buddy would begin in the
    smaller ones behind it, where no block of that size exists: blocks merge up to the one
    that they were cut from and no further, without a check.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.num_free = capacity
        # Sorted starts of the free blocks of 2**order slots.
        self._free: list[list[int]] = [[] for _ in range(capacity.bit_length())]
        start = 0
        for order in reversed(range(capacity.bit_length())):
            if capacity >> order & 1:
                self._free[order].append(start)
                start += 1 << order

    def rounded(self, size: int) -> int:
        """The next power of two."""
        return next_power_of_two(size)

    @property
    def largest(self) -> int:
        """The largest power of two in the capacity."""
        return 1 << self._capacity.bit_length() - 1

    @property
    def largest_free(self) -> int:
        """The largest free block; 0 if none."""
        orders = range(len(self._free) - 1, -1, -1)
        return next((1 << order for order in orders if self._free[order]), 0)

    def take(self, size: int) -> int | None:
        """Take the lowest block that fits, halved until it is as small as it may be."""
        wanted = _order(next_power_of_two(size))
        order = next((o for o in range(wanted, len(self._free)) if self._free[o]), None)
        if order is None:
            return None
        start = self._free[order].pop(0)
        while order > wanted:  # keep the lower half, free the upper one
            order -= 1
            insort(self._free[order], start + (1 << order))
        self.num_free -= 1 << wanted
        return start

    def extend(self, start: int, held: int, size: int) -> int | None:
        """Double the block while its buddy is behind it and free; None if that is not enough."""
        block = held
        while block < size:  # the buddy is behind the block, not before it, and free
            if start & block or not self._is_free(start + block, block):
                return None
            block *= 2
        self.num_free -= block - held
        while held < block:
            self._remove(start + held, held)
            held *= 2
        return block

    def give_back(self, start: int, held: int) -> None:
        """Free a block; it merges with its buddy as long as that is free, too."""
        enclosing = (1 << order for order in range(_order(held), len(self._free)))
        assert not any(self._is_free(start & -size, size) for size in enclosing), "freed twice"
        self.num_free += held
        while self._is_free(start ^ held, held):
            self._remove(start ^ held, held)
            start &= ~held
            held *= 2
        insort(self._free[_order(held)], start)

    def trim(self, start: int, held: int, size: int) -> None:
        """Free the upper half until the block is the smallest for ``size``."""
        block = self.rounded(size)
        while held > block:  # the upper half, down to the block or to nothing
            held //= 2
            self.give_back(start + held, max(held, 1))

    def _is_free(self, start: int, size: int) -> bool:
        if (order := _order(size)) >= len(self._free):
            return False
        starts = self._free[order]
        at = bisect_left(starts, start)
        return at < len(starts) and starts[at] == start

    def _remove(self, start: int, size: int) -> None:
        starts = self._free[_order(size)]
        del starts[bisect_left(starts, start)]

    def free_intervals(self) -> Iterator[tuple[int, int]]:
        """``(start, size)`` of the free blocks, by address."""
        return iter(sorted((s, 1 << order) for order, ss in enumerate(self._free) for s in ss))

    def check(self) -> None:
        """Raise ``AssertionError`` if blocks overlap, are misaligned or did not merge."""
        assert sum(size for _, size in self.free_intervals()) == self.num_free
        end = 0
        for start, size in self.free_intervals():
            assert start >= end and start % size == 0, "free blocks overlap or are misaligned"
            assert not self._is_free(start ^ size, size), "two free buddies did not merge"
            end = start + size
        assert end <= self._capacity, "a free block passes the end of the arena"


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0


def _order(block: int) -> int:
    return block.bit_length() - 1


PLACEMENTS: dict[str, type[FirstFit | BestFit | Buddy]] = {
    "first-fit": FirstFit,
    "best-fit": BestFit,
    "buddy": Buddy,
}
