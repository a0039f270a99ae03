"""The mapped books with pages that are really there: what each hook asks of the driver."""

from __future__ import annotations

import logging

import torch

from ..contract import OutOfMemory
from ..pages.table import RowPages
from ..tensors import host_memory
from .driver import DriverError
from .locked import LockedVmmAllocator
from .physical import PhysicalPool
from .space import RowSpace

log = logging.getLogger(__name__)


class BackedVmmAllocator(LockedVmmAllocator):
    """Maps pages under rows of addresses as the books put them there.

    Attributes
    ----------
    physical : PhysicalPool
        The pages, in the pool of the books.
    scrub : bool
        Overwrite tokens with zeros when their last holder gives them up.
    max_rows : int
        Rows that have addresses.
    """

    attaches = True
    physical: PhysicalPool
    scrub: bool
    max_rows: int
    _space: RowSpace

    def _choose_row(self, tokens: int, max_new: int = 0) -> int:
        row = super()._choose_row(tokens, max_new)
        if row >= self.max_rows:
            raise OutOfMemory(1, 0, 0, unit="rows")
        return row

    def _attach(self, row: int, g: int, begin: int, end: int) -> None:
        """Map the pages of the table, one access grant per column; all or nothing."""
        if self._space.is_guarded(row, g, begin, end):
            self.physical.driver.wait(self.physical.driver.fence())
        self._space.map(row, g, begin, self._pages_of(row, g, begin, end))

    def _detach(self, row: int, g: int, begin: int, end: int) -> None:
        """Unmap pages, once queued work that may read them has completed; all or nothing."""
        self.physical.driver.wait(self.physical.driver.fence())
        self._space.unmap(row, g, begin, self._pages_of(row, g, begin, end))

    def _pages_of(self, row: int, g: int, begin: int, end: int) -> RowPages:
        return self._table.view_of_row(row, self._columns[g], begin, end)

    def _leave_behind(self, row: int, tokens: int) -> None:
        try:
            super()._leave_behind(row, tokens)
        except DriverError as error:
            # The tokens are in place. The pages go at the next crossing, or with the sequence.
            log.warning("pages outside a sliding window stay mapped for now: %s", error)

    # ------------------------------------------------------------------ contents of pages

    def _read(self, row: int, g: int, begin: int, end: int) -> list[torch.Tensor]:
        with host_memory():
            return [spot.cpu().clone() for spot in self._space.spots(row, g, begin, end)]

    def _write_back(
        self, row: int, g: int, begin: int, end: int, contents: list[torch.Tensor]
    ) -> None:
        for spot, saved in zip(self._space.spots(row, g, begin, end), contents, strict=True):
            spot.copy_(saved)

    # What returns to the pool is scrubbed by the pool; here is what stays in place.

    def _scrub_warm(self, row: int, g: int, begin: int, end: int) -> None:
        if self.scrub:
            for spot in self._space.spots(row, g, begin, end):
                spot.zero_()

    def _scrub_rest(self, row: int, g: int, tokens: int, end: int) -> None:
        begin, first = divmod(tokens * self.groups[g].token_bytes, self.page_bytes)
        if self.scrub and begin < end:
            for spot in self._space.spots(row, g, begin, end):
                spot[first:].zero_()

    # ------------------------------------------------------------------ giving back

    def reclaim(self) -> int:
        """Unmap all warm pages, empty the prefix index, return free memory to the system."""
        with self.pool.lock:  # the mapper must not take a page whose memory is going
            num = super().reclaim()
            self.physical.trim()
        return num
