"""The pages of one driver: numbers for the books, handles for the driver calls."""

from __future__ import annotations

import numpy as np

from ..contract import OutOfMemory
from ..pages.pool import PageIds, PagePool
from ..pages.table import RowPages
from ..sequences import at_least_one, count
from .driver import Driver, check_driver

NONE = -1
"""The handle of a page that has no memory."""


class PhysicalPool(PagePool):
    """A page pool whose pages are real: a handle is created when a page is first taken.

    Handles stay when pages become free, since creating is the dearest call; ``provide`` creates
    them before they are needed, ``trim`` returns the memory of free pages to the system. Several
    caches may draw on one pool.

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
    scrubs : bool
        A cache that scrubs draws on this pool, or did: whoever takes a page finds zeros.
    unclean : bool array
        Per page, if so: it is to be overwritten with zeros when it is next put in place.
    """

    is_physical = True

    def __init__(self, driver: Driver, memory_bytes: int, page_bytes: int) -> None:
        check_driver(driver)
        page_bytes = at_least_one("page_bytes", page_bytes)
        if page_bytes % driver.granularity:
            raise ValueError(
                f"pages of {page_bytes} bytes are no multiple of the driver's granularity, "
                f"{driver.granularity}; choose a page size that is"
            )
        super().__init__(count("memory_bytes", memory_bytes) // page_bytes)
        self.driver = driver
        self.page_bytes = page_bytes
        self._handles = [NONE] * self.num_pages
        self.unclean = np.zeros(self.num_pages, np.bool_)
        self.scrubs = False

    @property
    def num_created(self) -> int:
        """Pages that take physical memory at the moment."""
        return self.num_pages - self._handles.count(NONE)

    def begin_to_scrub(self) -> None:
        """From now on zero every page that is taken, whoever gave it back.

        Those without memory too: drivers do not promise zeros.
        """
        with self.lock:  # a page that another thread takes meanwhile is somebody's tokens
            if not self.scrubs:
                self.scrubs = True
                self.unclean[self.free_pages()] = True

    def put(self, pages: PageIds) -> None:
        """Return pages without references to the free list."""
        super().put(pages)
        if self.scrubs:  # mapped nowhere: they are zeroed where they are seen next
            self.unclean[pages] = True

    def take(self, num_pages: int) -> PageIds:
        """Take free pages, each with memory and one reference.

        Raises
        ------
        OutOfMemory
            The system has less memory than the pool has pages; nothing was taken, and what the
            system gave stays with the pool (``trim`` returns it).
        """
        self._create(num_pages)
        return super().take(num_pages)

    def provide(self, num_pages: int | None = None) -> int:
        """Create the memory of free pages ahead of need, so that admissions do not wait for it.

        Parameters
        ----------
        num_pages
            How many of the free pages, those that are taken next; None: all of them.

        Returns
        -------
        int
            Pages that had no memory before.

        Raises
        ------
        OutOfMemory
            The system has no more; what was created until then stays (``trim`` returns it).
        ValueError
            More pages than are free.
        """
        with self.lock:
            return self._create(
                self.num_free if num_pages is None else count("num_pages", num_pages)
            )

    def secure(self, num_pages: int) -> None:
        """See that so many pages, free or spare, have memory.

        Spare ones have; free ones that have are those that are taken next.

        Raises
        ------
        OutOfMemory
            The system has less memory than the pool has pages; what it gave stays with the pool
            (``trim`` returns it).
        """
        num_fresh = max(num_pages - self.num_spare, 0)
        try:
            self._create(num_fresh)
        except OutOfMemory as error:  # of one page; what was asked for is the whole
            having = num_pages - self.num_lacking(num_fresh)
            raise OutOfMemory(num_pages, having, having, unit="pages") from error

    def num_lacking(self, num_pages: int) -> int:
        """Of the pages that are taken next, those without memory."""
        return len(self._lacking(num_pages))

    def _lacking(self, num_pages: int) -> list[int]:
        return [page for page in self._next(num_pages).tolist() if self._handles[page] == NONE]

    def _create(self, num_pages: int) -> int:
        """Handles for the pages that are taken next; returns how many were missing."""
        lacking = self._lacking(num_pages)
        for page in lacking:
            self._handles[page] = self.driver.create(self.page_bytes)
        return len(lacking)

    def handles(self, pages: RowPages) -> list[list[int]]:
        """Handles ``[column, n]`` of pages that were taken."""
        return [[self._handles[page] for page in column] for column in pages.tolist()]

    def trim(self) -> int:
        """Release the handles of free pages; returns how many."""
        with self.lock:  # else a page could be taken and lose its memory
            created = [page for page in self.free_pages().tolist() if self._handles[page] != NONE]
            for page in created:
                self.driver.release(self._handles[page])
                self._handles[page] = NONE
            return len(created)
