"""The zero guard in software: zeros behind what is mapped, for drivers that fault there.

A kernel that loads whole tiles reads past the end of a sequence. Where a mapped run ends, the few
pages that a tile can reach hold one shared page of zeros, mapped read-only. A page of tokens takes
its place when the row grows there, and it moves back when pages are unmapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby

import torch

from .driver import Driver, Guard
from .reservation import Reservation

GUARD_TOKENS = 256
"""How far a kernel may read past the end of a sequence, in tokens.

FlashAttention-3 loads whole tiles: 176 rows at head dimension 128, 224 in 8-bit types (its
``tile_size.h``).
"""


def lays_zeros(guard: Guard, driver: Driver, ahead_tokens: int) -> bool:
    """Whether a cache must lay zeros itself, since its driver does not read any.

    Raises
    ------
    ValueError
        The cache also maps ahead.
    """
    if guard == "fault" or driver.reads_zeros:
        return False
    if ahead_tokens:
        raise ValueError(
            "mapping ahead would replace the zeros behind a sequence while kernels read them: "
            "leave ahead_tokens at 0, or use guard='fault'"
        )
    return True


class ZeroPage:
    """One page of zeros to be mapped read-only anywhere; it belongs to no pool.

    It has an address of its own, where it is zeroed, and where a driver that cannot map
    read-only says so at once.

    Attributes
    ----------
    handle : int
        The driver's.
    """

    def __init__(self, driver: Driver, page_bytes: int) -> None:
        self._undo: list[Callable[[], None]] = []
        try:
            self.handle = handle = driver.create(page_bytes)
            self._undo.append(lambda: driver.release(handle))
            address = driver.reserve(page_bytes)
            self._undo.append(lambda: driver.free(address, page_bytes))
            driver.map(address, page_bytes, handle)
            self._undo.append(lambda: driver.unmap(address, page_bytes))
            driver.allow(address, page_bytes)
            driver.tensor(address, (page_bytes,), torch.uint8).zero_()
            driver.wait(driver.fence())
            driver.allow(address, page_bytes, write=False)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give it back; mapped nowhere else any more. After an error it goes on from there."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()


class GuardedReservation(Reservation):
    """A virtual buffer whose mapped runs are followed by zeros.

    Before pages are put where zeros are (``is_guarded``), what is queued must have completed, as
    before ``unmap``. Both verbs are all or nothing, zeros included.

    Parameters
    ----------
    zero
        The page of zeros; it stays the caller's.
    run_pages
        Pages of a row, or of a head of it: zeros do not reach into the next one.
    reach
        Pages that a tile can touch behind a mapped one.
    """

    def __init__(
        self,
        driver: Driver,
        num_bytes: int,
        page_bytes: int,
        *,
        zero: ZeroPage,
        run_pages: int,
        reach: int,
    ) -> None:
        super().__init__(driver, num_bytes, page_bytes)
        self._zero = zero
        self._run_pages = run_pages
        self._reach = reach
        self._real: set[int] = set()  # page numbers within the reservation
        self._zeros: set[int] = set()

    def is_guarded(self, offset: int, num_pages: int) -> bool:
        """Whether zeros are mapped where pages are to go."""
        begin = offset // self.page_bytes
        return not self._zeros.isdisjoint(range(begin, begin + num_pages))

    def map(self, offset: int, handles: Sequence[int], *, write: bool = True) -> None:
        """Map pages as ``Reservation.map`` does, with zeros behind them instead of under them."""
        pages = self._pages(offset, handles)
        with ExitStack() as undo:
            self._real.update(pages)
            undo.callback(self._real.difference_update, pages)
            missing = self._lift(pages, undo)
            super().map(offset, handles, write=write)
            undo.callback(super().unmap, offset, handles)
            self._lay(missing)
            undo.pop_all()

    def unmap(self, offset: int, handles: Sequence[int]) -> None:
        """Undo ``map``; the zeros move back."""
        pages = self._pages(offset, handles)
        with ExitStack() as undo:
            self._real.difference_update(pages)
            undo.callback(self._real.update, pages)
            missing = self._lift(pages, undo)
            super().unmap(offset, handles)
            undo.callback(super().map, offset, handles)
            self._lay(missing)
            undo.pop_all()

    def _pages(self, offset: int, handles: Sequence[int]) -> range:
        begin = offset // self.page_bytes
        return range(begin, begin + len(handles))

    def _lift(self, changed: range, undo: ExitStack) -> set[int]:
        """Take zeros away that have no place any more; returns where some are to be laid."""
        stop = (changed.start // self._run_pages + 1) * self._run_pages
        near = range(changed.start, min(changed.stop + self._reach, stop))
        wanted, present = self._wanted(near), self._zeros.intersection(near)
        self._take(present - wanted)
        undo.callback(self._lay, present - wanted)
        return wanted - present

    def _wanted(self, near: range) -> set[int]:
        """The pages among ``near`` that a tile can reach behind a mapped one of the same run."""
        first = near.start // self._run_pages * self._run_pages
        last, wanted = -self._reach - 1, set[int]()
        for page in range(max(first, near.start - self._reach), near.stop):
            if page in self._real:
                last = page
            elif page >= near.start and page - last <= self._reach:
                wanted.add(page)
        return wanted

    def _lay(self, pages: set[int]) -> None:
        """Put zeros in place; all or nothing."""
        with ExitStack() as undo:
            for run in _runs(pages):
                super().map(
                    run.start * self.page_bytes, [self._zero.handle] * len(run), write=False
                )
                self._zeros.update(run)
                undo.callback(self._take, run)
            undo.pop_all()

    def _take(self, pages: Iterable[int]) -> None:
        """Take zeros away."""
        for run in _runs(pages):
            start = self.address + run.start * self.page_bytes
            self._driver.unmap(start, len(run) * self.page_bytes)
            self._zeros.difference_update(run)


def _runs(pages: Iterable[int]) -> Iterator[range]:
    """Neighbours together, in ascending order."""
    for _, group in groupby(enumerate(sorted(pages)), lambda entry: entry[1] - entry[0]):
        run = [page for _, page in group]
        yield range(run[0], run[-1] + 1)
