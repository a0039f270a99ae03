"""The free slots of an arena: what every placement can do with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
