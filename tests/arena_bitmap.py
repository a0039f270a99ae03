"""An arena as one flag per slot, to judge the placements and the allocator by."""

from __future__ import annotations


class Bitmap:
    """One flag per slot; every question is answered by looking at all of them."""

    def __init__(self, capacity: int, rule: str) -> None:
        self.free = [True] * capacity
        self.rule = rule

    def rounded(self, size: int) -> int:
        """Slots held for ``size`` slots."""
        held = 1
        while held < size:
            held *= 2
        return held if self.rule == "buddy" and size else size

    def intervals(self) -> list[tuple[int, int]]:
        """Maximal free runs; for buddy the largest aligned free blocks."""
        found = []
        at = 0
        while at < len(self.free):
            size = self.block(at) if self.rule == "buddy" else self.run(at)
            if size:
                found.append((at, size))
            at += max(size, 1)
        return found

    def run(self, at: int) -> int:
        end = at
        while end < len(self.free) and self.free[end]:
            end += 1
        return end - at

    def block(self, at: int) -> int:
        size = 1 if self.free[at] else 0
        while size and at % (2 * size) == 0 and self.run(at) >= 2 * size:
            size *= 2
        return size

    def choose(self, size: int) -> int | None:
        fitting = [(held, start) for start, held in self.intervals() if held >= size]
        if not fitting:
            return None
        if self.rule == "first-fit":
            return min(start for _, start in fitting)
        return min(fitting)[1]

    def mark(self, start: int, size: int, free: bool) -> None:
        assert all(flag is not free for flag in self.free[start : start + size])
        self.free[start : start + size] = [free] * size

    def extended(self, start: int, held: int, size: int) -> int | None:
        """What an interval holds after growing in place, or None."""
        wanted = self.rounded(size)
        aligned = self.rule != "buddy" or start % wanted == 0
        if not aligned or start + wanted > len(self.free):
            return None
        return wanted if all(self.free[start + held : start + wanted]) else None
