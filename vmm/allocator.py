"""The mapped backend's books: physical pages under one contiguous address range per sequence.

A sequence owns a *row* of every buffer: an address range long enough for the longest sequence,
with pages under its beginning. Token ``t`` of row ``r`` lies at byte ``r · row_bytes +
t · token_bytes`` of the buffer, whatever pages are mapped there. (Prabhu et al., vAttention,
ASPLOS 2025.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..geometry import KVGeometry, check_geometry
from ..pages.allocator import PageAllocator
from ..pages.books import PageGroup
from ..pages.pool import PagePool
from ..sequences import at_least_one
from .buffers import LAYOUTS, buffers_of

RECLAIM_RUN = 32
"""Warm pages per buffer taken back at a time when memory is short: one call unmaps a run."""
ADOPTION = ("lowest", "fit-prompt", "fit-expected")


class VmmAllocator(PageAllocator):
    """Pages mapped where the tokens are expected to be; no table for the kernel to read.

    Parameters
    ----------
    geometry
        Bytes per token; ``SLOTS`` counts tokens alone.
    memory_bytes
        Physical memory, rounded down to whole pages.
    page_bytes
        Size of a page: a multiple of the driver's granularity (any size for the books alone).
    layout
        ``"token-major"``: one buffer per layer and tensor, ``[row, token, head, dim]``;
        ``"head-major"``: one per layer, tensor and head, ``[row, head, token, dim]``;
        ``"interleaved"``: all layers of equal window in one, ``[row, token, layer, …]``, so that
        a sequence wastes one page tail instead of one per buffer.
    adoption
        Which idle row a new sequence takes over, with the pages still mapped there:
        ``"lowest"``; ``"fit-prompt"``, the fewest mapped pages that cover the prompt, else the
        most; ``"fit-expected"``, the same for prompt and ``max_new``.
    limit
        Most tokens per sequence; None takes the model's context limit.
    pool
        The pages themselves, where somebody else made them (a cache does).
    """

    def __init__(
        self,
        geometry: KVGeometry,
        memory_bytes: int | None,
        page_bytes: int = 2 << 20,
        *,
        layout: str = "token-major",
        adoption: str = "lowest",
        limit: int | None = None,
        pool: PagePool | None = None,
    ) -> None:
        check_geometry(geometry)
        page_bytes = at_least_one("page_bytes", page_bytes)
        if adoption not in ADOPTION:
            raise ValueError(f"unknown adoption {adoption!r}; choose one of {', '.join(ADOPTION)}")
        if layout not in LAYOUTS:
            raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
        self.layout = layout
        self.adoption = adoption
        self.buffers = buffers_of(geometry, layout)
        groups = [
            PageGroup(
                tuple(layer for buffer in buffers for layer in buffer.layers),
                len(buffers),
                buffers[0].token_bytes,
                geometry.layers[buffers[0].layers[0]].window,
            )
            for buffers in self.buffers
        ]
        self._from_the_start = dict.fromkeys(range(len(groups)), 0)
        super().__init__(geometry, memory_bytes, page_bytes, groups, limit=limit, pool=pool)

    def _choose_row(self, tokens: int, max_new: int = 0) -> int:
        idle = self._seqs.free_rows
        if not idle:
            return self._seqs.next_row()
        if self.adoption == "lowest":
            return min(idle)
        return min(idle, key=self._misfit(tokens + max_new * (self.adoption == "fit-expected")))

    def _misfit(self, tokens: int) -> Callable[[int], tuple[bool, int, int]]:
        """Key that prefers the row with the fewest surplus pages, then the least lack."""
        need = self._pages_for(tokens, 0)

        def misfit(row: int) -> tuple[bool, int, int]:
            surplus = int(self._ready[0][row]) - need
            return surplus < 0, abs(surplus), row

        return misfit

    def _empty_row(self, row: int) -> None:
        """Leave the pages mapped: the next sequence of this row needs no driver call."""
        if self._windowed and any(gone[row] for gone in self._gone):
            self._clear_row(row)
            return
        self._retire_tails(row, self._from_the_start)

    def _retire_tails(self, row: int, begins: dict[int, int]) -> None:
        """Keep pages that nobody else holds or may ask for in place, as warm ones."""
        kept = list(begins)
        if self._num_shared or self.prefix_index.num_entries:
            wanted = {
                g: begin
                for g, begin in begins.items()
                if self._is_wanted(row, g, begin, self._held[g].item(row))
            }
            self._drop_tails(row, wanted)  # first, since it may fail
            kept = [g for g in begins if g not in wanted]
        for g in kept:
            begin, end = begins[g], self._held[g].item(row)
            self._scrub_warm(row, g, begin, end)
            pages = self._table.of_row(row, self._columns[g], begin, end)
            self.pool.rest(pages)
            self._num_used -= len(pages)
            self._num_warm += len(pages)
            self._held[g][row] = begin

    def _scrub_warm(self, row: int, g: int, begin: int, end: int) -> None:
        """Overwrite pages that stay in place without a holder (if asked to)."""

    def rows_near_boundary(self, distance: int, depth: int) -> list[int]:
        """Live rows that cross a page within ``distance`` tokens and have too few ready."""
        with self.pool.lock:
            near = self._covered - self._length <= distance
            lacking = np.zeros(len(near), np.bool_)
            for held, ready in zip(self._held, self._ready, strict=True):
                lacking |= ready - held < depth
            rows = np.flatnonzero(near & lacking & (self._covered > 0))
            return [int(row) for row in rows]

    def map_ahead(self, row: int, distance: int, depth: int) -> int:
        """Put up to ``depth`` further pages per buffer under a live row, as warm ones.

        Only out of free pages, and never beyond the longest sequence. Returns how many;
        the row may have moved on since ``rows_near_boundary``, then none.
        """
        with self.pool.lock:
            if not 0 < self._covered[row] <= self._length[row] + distance:
                return 0
            most = self._capacity if self.limit is None else min(self.limit, self._capacity)
            num_pages = 0
            for g in range(len(self.groups)):
                end = int(self._held[g][row]) + depth
                end = min(end, self._pages_for(most, g))
                num_pages += self._warm_up(row, g, end)
            return num_pages

    def _warm_up(self, row: int, g: int, end: int) -> int:
        """Extend the warm pages of a row to ``end``, if so many are free."""
        begin = int(self._ready[g][row])
        num = (end - begin) * self.groups[g].columns
        if num <= 0 or num > self.pool.num_free:
            return 0
        self.pool.rest(self._add(row, g, begin, end, self.pool.take(num)))
        self._ready[g][row] = end
        self._num_warm += num
        return num

    def reclaim(self) -> int:
        """Unmap every warm page and empty the prefix index; returns how many pages came free."""
        before = self.pool.num_free
        self.give_back(self.pool.num_pages)
        return self.pool.num_free - before

    def give_back(self, num_pages: int) -> None:
        """Take back warm pages, least valuable first, then units of the prefix index.

        Tails of the highest idle rows go first, since the lowest idle row is adopted first.
        """
        goal = self.pool.num_free + num_pages
        if self._num_warm:
            self._reclaim_warm(goal + RECLAIM_RUN * self.num_columns)
        if self.pool.num_free < goal:
            super().give_back(goal - self.pool.num_free)

    def _reclaim_warm(self, goal: int) -> None:
        """From idle rows first, which cover no token; the highest first, adopted last."""
        warm = self._ready[0] > self._held[0]
        for held, ready in zip(self._held[1:], self._ready[1:], strict=True):
            warm |= ready > held
        live = []
        for row in warm.nonzero()[0][::-1].tolist():
            if self._covered.item(row):
                live.append(row)
                continue
            self._unmap_warm(row, goal)
            if self.pool.num_free >= goal:
                return
        for row in live:
            self._unmap_warm(row, goal)
            if self.pool.num_free >= goal:
                return

    def _unmap_warm(self, row: int, goal: int) -> None:
        """Unmap the warm tail of a row, or as much of it as the goal asks for."""
        for g, group in enumerate(self.groups):
            held, ready = self._held[g].item(row), self._ready[g].item(row)
            lack = -(-(goal - self.pool.num_free) // group.columns)
            begin = max(held, ready - max(lack, 0))
            if begin == ready:
                continue
            pages = self._table.of_row(row, self._columns[g], begin, ready)
            self._detach(row, g, begin, ready)
            self._ready[g][row] = begin
            self._num_warm -= len(pages)
            self.pool.put(pages)

    def _table_bytes(self) -> int:
        return 8 * len(self._seqs)  # one start per sequence
