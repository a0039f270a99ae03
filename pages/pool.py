"""A pool of fixed-size, reference-counted pages: blocks (paged) or physical pages (vmm)."""

from __future__ import annotations

import weakref
from threading import RLock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..sequences import Ints, count

PageIds = NDArray[np.intp]
"""Page numbers, in the type that numpy indexes with; tables for kernels hold them as int32."""


class PoolMember(Protocol):
    """An allocator, as its pool sees it."""

    @property
    def num_spare(self) -> int:
        """Pages that it keeps and nobody holds."""
        ...

    def give_back(self, num_pages: int) -> None:
        """Return up to that many spare pages, the least valuable first."""
        ...

    def count_refs(self) -> Ints:
        """References per page by its tables."""
        ...


def check_pool(pool: object, kind: type[PagePool]) -> None:
    """Refuse what is no pool of that kind."""
    if not isinstance(pool, kind):
        raise TypeError(f"pool must be a {kind.__name__} of {kind.__module__}, not {pool!r}")


class PagePool:
    """Page numbers ``0 … num_pages − 1``, their reference counts, and a free list.

    Order of reuse: last freed, first taken; never used pages in ascending order. Of the pages
    freed in one call, the first of the list is taken first.

    Several allocators may draw on one pool; each takes from what the others left. One that is
    dropped before it released its sequences takes their pages along.

    Attributes
    ----------
    num_free : int
        Pages in the free list.
    is_physical : bool
        The pages take memory, which a system may refuse: for caches, not for books alone.
    lock : threading.RLock
        Taken by caches that change the books from two threads.
    """

    is_physical = False

    def __init__(self, num_pages: int) -> None:
        num_pages = count("num_pages", num_pages)
        if num_pages < 1:
            raise ValueError(
                "the memory is smaller than one page; give more memory or smaller pages"
            )
        if num_pages > np.iinfo(np.int32).max:
            raise ValueError(f"{num_pages} pages exceed int32 block tables; use larger pages")
        self.num_pages = num_pages
        self._refs = np.zeros(num_pages, np.int32)
        # A stack; its top is at the end, so that taking is a slice.
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.intp)
        self._place = np.zeros(num_pages, np.int32)
        self._count = np.arange(num_pages, dtype=np.int32)
        self._ones = np.ones(num_pages, np.int32)
        self._none = np.zeros(num_pages, np.int32)
        self.num_free = num_pages
        self.lock = RLock()
        self._members: list[weakref.ref[PoolMember]] = []

    def join(self, member: PoolMember) -> None:
        """Enter an allocator that draws on this pool."""
        with self.lock:  # caches are made and closed in several threads
            self._members = [weakref.ref(each) for each in (*self.members(), member)]

    def leave(self, member: PoolMember) -> None:
        """Remove an allocator that has nothing of this pool any more. Twice is harmless."""
        with self.lock:
            self._members = [weakref.ref(each) for each in self.members() if each is not member]

    def members(self) -> list[PoolMember]:
        """The allocators that draw on this pool, in the order in which they joined."""
        found = [ref() for ref in self._members]
        return [member for member in found if member is not None]

    @property
    def num_spare(self) -> int:
        """Pages that nobody holds but that a member keeps: warm rows, prefix index."""
        num = 0
        for ref in self._members:
            member = ref()
            if member is not None:
                num += member.num_spare
        return num

    def take(self, num_pages: int) -> PageIds:
        """Take free pages, each with one reference."""
        pages = self._next(num_pages)
        self.num_free -= num_pages
        self._refs[pages] = self._ones[:num_pages]
        return pages

    def secure(self, num_pages: int) -> None:
        """See that so many pages, free or spare, have memory: nothing to do for numbers."""

    def num_lacking(self, num_pages: int) -> int:
        """Of the pages that are taken next, those without memory: none, where pages are numbers."""
        return 0

    def _next(self, num_pages: int) -> PageIds:
        """The free pages that are taken next."""
        if not 0 <= num_pages <= self.num_free:
            raise ValueError(f"{num_pages} pages asked for, {self.num_free} are free")
        return self._free[self.num_free - num_pages : self.num_free][::-1].copy()

    def reclaim(self, num_pages: int, asker: PoolMember) -> None:
        """Make that many more pages free out of spare ones: the asker's own first."""
        goal = self.num_free + num_pages
        asker.give_back(num_pages)
        for member in self.members() if self.num_free < goal else ():
            if self.num_free < goal:
                member.give_back(goal - self.num_free)
        assert self.num_free >= goal, "spare pages are missing"

    def share(self, pages: PageIds) -> None:
        """Add one reference to each page."""
        np.add.at(self._refs, pages, 1)

    def drop(self, pages: PageIds) -> PageIds:
        """Remove one reference from each page; returns those that have none left.

        They are *not* free yet: the caller keeps them (a prefix index, a warm row) or hands
        them to ``put``.

        Raises
        ------
        ValueError
            A page named twice, or one without references; nothing was changed.
        """
        if len(pages) > 1 and self._names_twice(pages):
            raise ValueError("a page is named twice in one release; nothing was changed")
        refs = self._refs[pages] - self._ones[: len(pages)]
        held = refs.nonzero()[0]
        if held.size and refs.min() < 0:
            raise ValueError("a page without references was released; nothing was changed")
        self._refs[pages] = refs
        if not held.size:
            return pages
        dead: PageIds = pages[refs == 0]
        return dead

    def _names_twice(self, pages: PageIds) -> bool:
        """Each page remembers its last place in the list; a page named twice knows only one."""
        places = self._count[: len(pages)]
        self._place[pages] = places
        return bool((self._place[pages] != places).nonzero()[0].size)

    def rest(self, pages: PageIds) -> None:
        """Take the one reference of pages that are kept, warm."""
        self._refs[pages] = self._none[: len(pages)]

    def revive(self, pages: PageIds) -> None:
        """Give one reference to pages that have none and are not free (warm ones)."""
        self._refs[pages] = self._ones[: len(pages)]

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

    def check(self) -> None:
        """Assert that free, spare and held pages are all there are, and counted right."""
        free = self.free_pages()
        assert len(np.unique(free)) == len(free), "a page is free twice"
        assert not self._refs[free].any(), "a free page has references"
        members = self.members()
        held = sum((member.count_refs() for member in members), np.zeros(self.num_pages, np.int64))
        assert np.array_equal(self._refs, held), "reference counts differ from the holders' books"
        used = int((held > 0).sum())
        assert self.num_free + self.num_spare + used == self.num_pages, "a page is lost"
