"""How rows come by their pages and lose them: taking, sharing, leaving behind, giving up."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from ..sequences import Ints, Rows
from .books import PageBooks
from .pool import PageIds


class PagePlacing(PageBooks):
    """Moves pages between pool, rows and prefix index; every step is whole or undone."""

    def _place(self, rows: Rows, lengths: Ints) -> None:
        """Put pages for ``lengths`` tokens under ``rows``: under all of them, or under none."""
        if not self.attaches and self._place_next(rows, lengths):
            return
        begins = [held[rows] for held in self._held]
        ends = [np.maximum(self._pages_for(lengths, g), b) for g, b in enumerate(begins)]
        needed = 0
        for group, begin, end in zip(self.groups, begins, ends, strict=True):
            needed += int((end - begin).sum()) * group.columns
        self._require_free(needed)
        warm_ends = self._adopt(rows, begins, ends) if self._num_warm else begins
        try:
            self._add_fresh(rows, warm_ends, ends)
        except BaseException:
            self._abandon(rows, begins, warm_ends)
            raise
        self._num_used += needed
        self._set_held(rows, ends)

    def _place_next(self, rows: Rows, lengths: Ints) -> bool:
        """The common crossing in few steps: one more page per row, warm or fresh, no driver.

        False if it is not that, or does not fit; nothing was changed then.
        """
        if self._whole_tokens is None:
            return False
        held, ready, pool = self._held[0], self._ready[0], self.pool
        begins = held[rows]
        covered = begins * self._whole_tokens
        beyond = lengths - covered
        if beyond.min() <= 0 or beyond.max() > self._whole_tokens:
            return False
        if len(rows) > pool.num_free + pool.num_spare:
            return False
        cold, at = rows, begins
        if self._num_warm:
            warm = ready[rows] > begins
            cold, at = rows[~warm], begins[~warm]
            pool.revive(self._table.pages[rows[warm], 0, begins[warm]])
            self._num_warm += len(cold) - len(rows)
        held[rows] = begins + 1
        if len(cold):
            self._table.fill_next(cold, 0, at, self._take(len(cold)))
            ready[cold] = at + 1
        covered += self._whole_tokens
        self._covered[rows] = covered if self.limit is None else np.minimum(covered, self.limit)
        self._num_used += len(rows)
        return True

    def _set_held(self, rows: Rows, ends: list[Ints]) -> None:
        """Book page counts of ``rows`` and the tokens that they can take."""
        covered: Ints | None = None
        for g, (group, end) in enumerate(zip(self.groups, ends, strict=True)):
            self._held[g][rows] = end
            self._ready[g][rows] = np.maximum(end, self._ready[g][rows])
            tokens = end * self.page_bytes // group.token_bytes
            covered = tokens if covered is None else np.minimum(covered, tokens)
        assert covered is not None
        self._covered[rows] = covered if self.limit is None else np.minimum(covered, self.limit)

    def _adopt(self, rows: Rows, begins: list[Ints], ends: list[Ints]) -> list[Ints]:
        """Use the warm pages that are in place already; returns how far they reach."""
        reach = []
        for g, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            warm_end = np.minimum(end, np.maximum(self._ready[g][rows], begin))
            pages = self._table.of_rows(rows, self._columns[g], begin, warm_end)
            self.pool.revive(pages)
            self._num_warm -= len(pages)
            self._held[g][rows] = warm_end
            reach.append(warm_end)
        return reach

    def _abandon(self, rows: Rows, begins: list[Ints], warm_ends: list[Ints]) -> None:
        """Undo ``_adopt``."""
        for g, (begin, warm_end) in enumerate(zip(begins, warm_ends, strict=True)):
            pages = self._table.of_rows(rows, self._columns[g], begin, warm_end)
            self.pool.drop(pages)
            self._num_warm += len(pages)
            self._held[g][rows] = begin

    def _add_fresh(self, rows: Rows, begins: list[Ints], ends: list[Ints]) -> None:
        """Take pages from the pool and attach them; on failure nothing is taken."""
        with ExitStack() as undo:
            for g, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                num = int((end - begin).sum()) * self.groups[g].columns
                if num == 0:
                    continue
                pages = self._take(num)
                undo.callback(self._put_back, pages)
                self._table.fill(rows, self._columns[g], begin, end, pages)
                self._attach(rows, g, begin, end)
                undo.callback(self._detach, rows, g, begin, end)
            undo.pop_all()

    def _take(self, num_pages: int) -> PageIds:
        """Pages from the pool, after taking back spare ones if it is dry."""
        if num_pages > self.pool.num_free:
            self.pool.reclaim(num_pages - self.pool.num_free, self)
        return self.pool.take(num_pages)

    def _put_back(self, pages: PageIds) -> None:
        self.pool.put(self.pool.drop(pages))

    def _give_up(self, pages: PageIds) -> None:
        """Drop one reference to each page; those without any go back, or stay in the index."""
        dead = self.pool.drop(pages)
        self._num_used -= len(dead)
        self._num_shared -= len(pages) - len(dead)
        if self.prefix_index.num_entries:
            dead = self.prefix_index.retire(dead)
        self._scrub(dead)
        self.pool.put(dead)

    def _share(self, row: int, g: int, begin: int, pages: PageIds) -> None:
        """Let a row hold pages that have a holder, or wait in the index, from ``begin`` on."""
        idle = self.pool.refs(pages) == 0
        num_idle = int(idle.sum())
        if num_idle:
            self.prefix_index.claim(pages[idle])
        self.pool.share(pages)
        self._num_used += num_idle
        self._num_shared += len(pages) - num_idle
        end = begin + len(pages) // len(self._columns[g])
        at, first, last = np.array([row]), np.array([begin]), np.array([end])
        self._table.fill(at, self._columns[g], first, last, pages)
        try:
            self._attach(at, g, first, last)
        except BaseException:
            self._give_up(pages)
            raise
        self._held[g][row] = self._ready[g][row] = end

    def _leave_behind(self, rows: Rows, tokens: int) -> None:
        """Give back pages that no query of the newest ``tokens`` tokens can see any more."""
        for g, group in enumerate(self.groups):
            if group.window is None:
                continue
            first = np.maximum(self._length[rows] - tokens + 1 - group.window, 0)
            unit = self._unit_bytes[g]
            ends = first * group.token_bytes // unit * unit // self.page_bytes
            for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
                begin = int(self._gone[g][row])
                if end > begin:
                    pages = self._table.of_row(row, self._columns[g], begin, end)
                    self._detach(np.array([row]), g, np.array([begin]), np.array([end]))
                    self._gone[g][row] = end
                    self._num_gone += len(pages)
                    self._give_up(pages)

    def _drop_tails(self, row: int, begins: dict[int, int]) -> None:
        """Take the pages from ``begins[g]`` on out of a row, held and warm: in all groups or none.

        Parameters
        ----------
        begins
            Page numbers within the row, by group.
        """
        if self.attaches:
            self._detach_tails(row, begins)
        for g, begin in begins.items():
            held, ready = int(self._held[g][row]), int(self._ready[g][row])
            pages = self._table.of_row(row, self._columns[g], begin, held)
            warm = self._table.of_row(row, self._columns[g], max(begin, held), ready)
            self._held[g][row] = self._ready[g][row] = begin
            self._give_up(pages)
            self.pool.put(warm)
            self._num_warm -= len(warm)

    def _detach_tails(self, row: int, begins: dict[int, int]) -> None:
        with ExitStack() as undo:
            for g, begin in begins.items():
                ready = int(self._ready[g][row])
                if ready > begin:
                    span = np.array([row]), g, np.array([begin]), np.array([ready])
                    self._detach(*span)
                    undo.callback(self._attach, *span)
            undo.pop_all()

    def _retire_tails(self, row: int, begins: dict[int, int]) -> None:
        """Give up the pages from ``begins[g]`` on; a backend may keep them in place, warm."""
        self._drop_tails(row, begins)

    def _clear_row(self, row: int) -> None:
        """Take every page out of a row, held and warm."""
        self._drop_tails(row, {g: int(gone[row]) for g, gone in enumerate(self._gone)})
        for g, columns in enumerate(self._columns):
            self._num_gone -= int(self._gone[g][row]) * len(columns)
            self._gone[g][row] = self._held[g][row] = self._ready[g][row] = 0
        self._covered[row] = 0

    def _empty_row(self, row: int) -> None:
        """Take the pages out of the row of a released sequence."""
        self._clear_row(row)

    def _empty_place(self) -> int:
        """A row without pages, not even warm ones."""
        row = self._choose_row(0)
        self._make_row(row)
        self._clear_row(row)
        return row
