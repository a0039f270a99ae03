"""A virtual buffer: an address range of which any parts have pages under them."""

from __future__ import annotations

from collections.abc import Sequence

from .driver import Driver


class Reservation:
    """``num_bytes`` of addresses; pages of ``page_bytes`` are put under them and taken away.

    Putting is all or nothing: a driver call that fails leaves no mapping behind.
    """

    def __init__(self, driver: Driver, num_bytes: int, page_bytes: int) -> None:
        self._driver = driver
        self.num_bytes = num_bytes
        self.page_bytes = page_bytes
        self.address = driver.reserve(num_bytes)

    def map(self, offset: int, handles: Sequence[int], *, write: bool = True) -> None:
        """Map pages side by side from a byte offset, then allow access to the run in one call."""
        driver, size = self._driver, self.page_bytes
        start = self.address + offset
        at = start
        try:
            for handle in handles:
                driver.map(at, size, handle)
                at += size
            driver.allow(start, at - start, write=write)
        except BaseException:
            while at > start:
                at -= size
                driver.unmap(at, size)
            raise

    def unmap(self, offset: int, handles: Sequence[int]) -> None:
        """Undo ``map``."""
        self._driver.unmap(self.address + offset, len(handles) * self.page_bytes)

    def free(self) -> None:
        """Give the addresses back; nothing may be mapped any more."""
        self._driver.free(self.address, self.num_bytes)
