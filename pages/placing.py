"""How rows come by their pages: warm ones, fresh ones, or a share in somebody else's."""

from __future__ import annotations

import numpy as np

from ..contract import OutOfMemory
from ..sequences import ONE, Rows
from .leaving import PageLeaving
from .pool import PageIds


class PagePlacing(PageLeaving):
    """Puts pages under rows; every step is whole or undone."""

    def _place(self, row: int, tokens: int) -> None:
        """Put pages for ``tokens`` tokens under a row: all of them, or none."""
        begins, ends, needed = self._lacking(row, tokens)
        self._require_free(needed)
        reach = self._adopt(row, begins, ends) if self._num_warm else begins
        try:
            self._add_fresh(row, reach, ends)
        except BaseException:
            self._abandon(row, begins, reach)
            raise
        self._num_used += needed
        self._set_held(row, ends)

    def _lacking(self, row: int, tokens: int) -> tuple[list[int], list[int], int]:
        """By group, the page numbers that a row needs beyond those it holds; and how many pages."""
        begins, ends, num = [], [], 0
        for g, group in enumerate(self.groups):
            begin, end = self._held[g].item(row), self._pages_for(tokens, g)
            if end < begin:
                end = begin
            num += (end - begin) * group.columns
            begins.append(begin)
            ends.append(end)
        return begins, ends, num

    def _place_more(self, rows: Rows, goals: list[int], tokens: int) -> None:
        """Put pages under rows that lack them to reach their goals: under all of them, or none.

        Parameters
        ----------
        goals
            Tokens of each row after this, ``tokens`` more than before.
        """
        if not self.attaches and self._place_next(rows, tokens):
            return
        if len(goals) == 1:
            return self._place(rows.item(), goals[0])
        self._require_free(sum(needed for *_, needed in map(self._lacking, rows.tolist(), goals)))
        placed: list[tuple[int, list[int]]] = []
        try:
            for row, goal in zip(rows.tolist(), goals, strict=True):
                begins = [held.item(row) for held in self._held]
                self._place(row, goal)
                placed.append((row, begins))
        except BaseException:
            for row, begins in placed:
                self._retire_tails(row, dict(enumerate(begins)))
                self._set_held(row, begins)
            raise

    def _place_next(self, rows: Rows, tokens: int) -> bool:
        """One more page per buffer for each row, warm or fresh: the common step of a batch.

        Where pages take no work to be put in place. False if the step is another; nothing was
        changed then.
        """
        page_tokens, pool = self._whole_tokens, self.pool
        if page_tokens is None or tokens > page_tokens:
            return False
        num = len(rows) * self.num_columns
        self._require_free(num)
        begins = self._held[0][rows]
        ends = begins + ONE
        self._held[0][rows] = ends
        cold, at, until = rows, begins, ends
        if self._num_warm:
            is_warm = self._ready[0][rows] > begins
            warm = is_warm.nonzero()[0]
            if warm.size:
                pool.revive(self._table.of_rows(rows[warm], begins[warm]))
                self._num_warm -= len(warm) * self.num_columns
                cold, at, until = rows[~is_warm], begins[~is_warm], ends[~is_warm]
        if len(cold):
            pages = self._take(len(cold) * self.num_columns)
            self._table.fill_rows(cold, at, pages)
            self._ready[0][cold] = until
        covered = ends * page_tokens
        self._covered[rows] = covered if self.limit is None else np.minimum(covered, self.limit)
        self._num_used += num
        return True

    def _set_held(self, row: int, ends: list[int]) -> None:
        """Book page counts of a row and the tokens that they can take."""
        covered = self.limit
        for g, end in enumerate(ends):
            self._held[g][row] = end
            if end > self._ready[g].item(row):
                self._ready[g][row] = end
            tokens = end * self.page_bytes // self.groups[g].token_bytes
            covered = tokens if covered is None else min(covered, tokens)
        assert covered is not None, "there is at least one group"
        self._covered[row] = covered

    def _adopt(self, row: int, begins: list[int], ends: list[int]) -> list[int]:
        """Use the warm pages that are in place already; returns how far they reach."""
        reach = []
        for g, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            warm_end = min(end, self._ready[g].item(row))
            if warm_end > begin:
                pages = self._table.of_row(row, self._columns[g], begin, warm_end)
                self.pool.revive(pages)
                self._num_warm -= len(pages)
                self._held[g][row] = warm_end
            reach.append(warm_end)
        return reach

    def _abandon(self, row: int, begins: list[int], reach: list[int]) -> None:
        """Undo ``_adopt``."""
        for g, (begin, warm_end) in enumerate(zip(begins, reach, strict=True)):
            pages = self._table.of_row(row, self._columns[g], begin, warm_end)
            self.pool.drop(pages)
            self._num_warm += len(pages)
            self._held[g][row] = begin

    def _add_fresh(self, row: int, begins: list[int], ends: list[int]) -> None:
        """Take pages from the pool and attach them; on failure nothing is taken."""
        added: list[tuple[int, int, int, PageIds]] = []
        try:
            for g, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                if end > begin:
                    pages = self._take((end - begin) * self.groups[g].columns)
                    added.append((g, begin, end, self._add(row, g, begin, end, pages)))
        except BaseException:
            for g, begin, end, pages in reversed(added):
                self._detach(row, g, begin, end)
                self._put_back(pages)
            raise

    def _add(self, row: int, g: int, begin: int, end: int, pages: PageIds) -> PageIds:
        """Attach pages just taken for one group, or return them to the pool."""
        try:
            self._table.fill(row, self._columns[g], begin, end, pages)
            self._attach(row, g, begin, end)
        except BaseException:
            self._put_back(pages)
            raise
        return pages

    def _take(self, num_pages: int) -> PageIds:
        """Pages from the pool, after taking back spare ones if it is dry, or the system is."""
        pool = self.pool
        if num_pages > pool.num_free:
            pool.reclaim(num_pages - pool.num_free, self)
        try:
            return pool.take(num_pages)
        except OutOfMemory:  # spare pages have memory, and what came free last is taken first
            num_lacking = pool.num_lacking(num_pages)
            if num_lacking > pool.num_spare:
                raise
            pool.reclaim(num_lacking, self)
            return pool.take(num_pages)

    def _put_back(self, pages: PageIds) -> None:
        dead = self.pool.drop(pages)
        self._scrub(dead)  # a copy may have been written there before the verb failed
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
        end = begin + len(pages) // self.groups[g].columns
        self._table.fill(row, self._columns[g], begin, end, pages)
        try:
            self._attach(row, g, begin, end)
        except BaseException:
            self._give_up(pages)
            raise
        self._held[g][row] = self._ready[g][row] = end

    def _empty_place(self) -> int:
        """A row without pages, not even warm ones."""
        row = self._choose_row(0)
        self._make_row(row)
        self._clear_row(row)
        return row
