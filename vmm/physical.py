"""The pages of one driver: numbers for the books, handles for the driver calls."""

from __future__ import annotations

import numpy as np

from ..pages import PageIds, PagePool
from .driver import Driver


class PhysicalPool(PagePool):
    """A page pool whose pages are real: a handle is created when a page is first mapped.

    Handles stay when pages become free, since creating is the dearest call; ``trim`` returns
    the memory of free pages to the system.
    """

    def __init__(self, driver: Driver, num_pages: int, page_bytes: int) -> None:
        super().__init__(num_pages)
        self._driver = driver
        self.page_bytes = page_bytes
        self._handles = np.full(num_pages, -1, np.int64)

    @property
    def num_created(self) -> int:
        """Pages that take physical memory at the moment."""
        return int((self._handles >= 0).sum())

    def handles(self, pages: PageIds) -> list[int]:
        """Handles of pages, created where missing. ``OutOfMemory`` if the driver has no more."""
        handles: list[int] = self._handles[pages].tolist()
        for i, handle in enumerate(handles):
            if handle < 0:
                handles[i] = self._driver.create(self.page_bytes)
                self._handles[pages[i]] = handles[i]
        return handles

    def trim(self) -> int:
        """Release the handles of free pages; returns how many."""
        free = self.free_pages()
        created = free[self._handles[free] >= 0]
        for page in created.tolist():
            handle, self._handles[page] = int(self._handles[page]), -1
            self._driver.release(handle)
        return len(created)
