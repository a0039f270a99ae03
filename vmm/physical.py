"""The pages of one driver: numbers for the books, handles for the driver calls."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..pages.pool import PageIds, PagePool
from ..sequences import count
from .driver import Driver


class PhysicalPool(PagePool):
    """A page pool whose pages are real: a handle is created when a page is first mapped.

    Handles stay when pages become free, since creating is the dearest call; ``trim`` returns
    the memory of free pages to the system. Several caches may draw on one pool.

    Parameters
    ----------
    driver
        Where the memory comes from; it stays the caller's.
    memory_bytes
        Most memory that the pool takes, rounded down to whole pages.
    page_bytes
        A multiple of the driver's granularity.

    Attributes
    ----------
    unclean : bool array
        Per page: it is to be overwritten with zeros when it is next put in place.
    """

    def __init__(self, driver: Driver, memory_bytes: int, page_bytes: int) -> None:
        if page_bytes < 1 or page_bytes % driver.granularity:
            raise ValueError(
                f"pages of {page_bytes} bytes are no multiple of the driver's granularity, "
                f"{driver.granularity}; choose a page size that is"
            )
        super().__init__(count("memory_bytes", memory_bytes) // page_bytes)
        self.driver = driver
        self.page_bytes = page_bytes
        self._handles = np.full(self.num_pages, -1, np.int64)
        self.unclean = np.zeros(self.num_pages, np.bool_)

    @property
    def num_created(self) -> int:
        """Pages that take physical memory at the moment."""
        return int((self._handles >= 0).sum())

    def lacking(self, pages: PageIds) -> NDArray[np.bool_]:
        """Which of the pages have no memory yet."""
        lacking: NDArray[np.bool_] = self._handles[pages] < 0
        return lacking

    def handles(self, pages: PageIds) -> list[int]:
        """Handles of pages, created where missing. ``OutOfMemory`` if the driver has no more."""
        handles: list[int] = self._handles[pages].tolist()
        for i, handle in enumerate(handles):
            if handle < 0:
                handles[i] = self.driver.create(self.page_bytes)
                self._handles[pages[i]] = handles[i]
        return handles

    def trim(self) -> int:
        """Release the handles of free pages; returns how many."""
        free = self.free_pages()
        created = free[~self.lacking(free)]
        for page in created.tolist():
            self.driver.release(int(self._handles[page]))
            self._handles[page] = -1
        return len(created)
