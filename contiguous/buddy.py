"""Placement in buddy blocks: powers of two, halved when taken and merged when freed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from .arena import Placement


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
