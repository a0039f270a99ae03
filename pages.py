"""A pool of fixed-size, reference-counted pages: blocks (paged) or physical pages (vmm)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .sequences import Ints

PageIds = NDArray[np.int32]


class PagePool:
    """Page numbers ``0 … num_pages − 1``, their reference counts, and a free list.

    Order of reuse: last freed, first taken; never used pages in ascending order. Of the pages
    freed in one call, the first of the list is taken first.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError("the memory is smaller than one page; give more memory")
        if num_pages > np.iinfo(np.int32).max:
            raise ValueError(f"{num_pages} pages exceed int32 block tables; use larger pages")
        self.num_pages = num_pages
        self._refs = np.zeros(num_pages, np.int32)
        # A stack; its top is at the end, so that taking is a slice.
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.num_free = num_pages

    def take(self, num_pages: int) -> PageIds:
        """Take free pages, each with one reference."""
        if not 0 <= num_pages <= self.num_free:
            raise ValueError(f"{num_pages} pages asked for, {self.num_free} are free")
        bottom = self.num_free - num_pages
        pages = self._free[bottom : self.num_free][::-1].copy()
        self.num_free = bottom
        self._refs[pages] = 1
        return pages

    def share(self, pages: PageIds) -> None:
        """Add one reference to each page; pages without any stay out of the free list."""
        np.add.at(self._refs, pages, 1)

    def drop(self, pages: PageIds) -> PageIds:
        """Remove one reference from each page; returns those that have none left.

        They are *not* free yet: the caller keeps them (a prefix index, a warm row) or hands
        them to ``put``. A page named twice loses two references.
        """
        np.subtract.at(self._refs, pages, 1)
        refs: PageIds = self._refs[pages]
        if refs.size and refs.min() < 0:
            np.add.at(self._refs, pages, 1)
            raise ValueError("a page without references was released; nothing was changed")
        dead: PageIds = pages[refs == 0]
        if dead.size > 1 and len(np.unique(dead)) != dead.size:
            dead = dead[np.sort(np.unique(dead, return_index=True)[1])]
        return dead

    def revive(self, pages: PageIds) -> None:
        """Give one reference to pages that have none and are not free (warm ones)."""
        assert not self._refs[pages].any(), "a page in use cannot be warm"
        self._refs[pages] = 1

    def put(self, pages: PageIds) -> None:
        """Return pages without references to the free list."""
        num = len(pages)
        assert self.num_free + num <= self.num_pages, "a page is free twice"
        self._free[self.num_free : self.num_free + num] = pages[::-1]
        self.num_free += num

    def free_pages(self) -> PageIds:
        """The free pages, in no particular order."""
        return self._free[: self.num_free].copy()

    def refs(self, pages: PageIds) -> Ints:
        """References of each page."""
        return self._refs[pages].astype(np.int64)

    def check(self, held: Ints) -> None:
        """Assert that ``held`` (references per page, by the holders' books) is what is booked.

        Free pages are distinct and nobody's.
        """
        free = self._free[: self.num_free]
        assert len(np.unique(free)) == len(free), "a page is free twice"
        assert not self._refs[free].any(), "a free page has references"
        assert np.array_equal(self._refs, held), "reference counts differ from the holders' books"
