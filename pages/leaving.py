"""How rows lose their pages: given up, left behind by a window, left in place as warm ones."""

from __future__ import annotations

from contextlib import ExitStack

from .books import PageBooks
from .pool import PageIds


class PageLeaving(PageBooks):
    """Takes pages out of rows; every step is whole or undone."""

    def _give_up(self, pages: PageIds) -> None:
        """Drop one reference to each page; those without any go back, or stay in the index."""
        dead = self.pool.drop(pages)
        self._num_used -= len(dead)
        self._num_shared -= len(pages) - len(dead)
        if self.prefix_index.num_entries:
            dead = self.prefix_index.retire(dead)
        self._scrub(dead)
        self.pool.put(dead)

    def _is_wanted(self, row: int, g: int, begin: int, end: int) -> bool:
        """Whether any page of a row has a second reader, now or (in the prefix index) later."""
        pages = self._table.of_row(row, self._columns[g], begin, end)
        if self._num_shared and (self.pool.refs(pages) > 1).any():
            return True
        return self.prefix_index.holds(pages)

    def _leave_behind(self, row: int, tokens: int) -> None:
        """Give back pages that no query of the newest ``tokens`` tokens can see any more."""
        for g, group in enumerate(self.groups):
            if group.window is None:
                continue
            first = max(self._length.item(row) - tokens + 1 - group.window, 0)
            unit = self._unit_bytes[g]
            begin, end = self._gone[g].item(row), first * group.token_bytes // unit * unit
            end //= self.page_bytes
            if end > begin:
                pages = self._table.of_row(row, self._columns[g], begin, end)
                self._detach(row, g, begin, end)
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
            held, ready = self._held[g].item(row), self._ready[g].item(row)
            self._held[g][row] = self._ready[g][row] = begin
            if held > begin:
                self._give_up(self._table.of_row(row, self._columns[g], begin, held))
            if ready > held:
                warm = self._table.of_row(row, self._columns[g], max(begin, held), ready)
                self.pool.put(warm)
                self._num_warm -= len(warm)

    def _detach_tails(self, row: int, begins: dict[int, int]) -> None:
        with ExitStack() as undo:
            for g, begin in begins.items():
                ready = int(self._ready[g][row])
                if ready > begin:
                    self._detach(row, g, begin, ready)
                    undo.callback(self._attach, row, g, begin, ready)
            undo.pop_all()

    def _retire_tails(self, row: int, begins: dict[int, int]) -> None:
        """Give up the pages from ``begins[g]`` on; a backend may keep them in place, warm."""
        self._drop_tails(row, begins)

    def _clear_row(self, row: int) -> None:
        """Take every page out of a row, held and warm."""
        self._drop_tails(row, {g: int(gone[row]) for g, gone in enumerate(self._gone)})
        for g, group in enumerate(self.groups):
            self._num_gone -= self._gone[g].item(row) * group.columns
            self._gone[g][row] = self._held[g][row] = self._ready[g][row] = 0
        self._covered[row] = 0

    def _empty_row(self, row: int) -> None:
        """Take the pages out of the row of a released sequence."""
        self._clear_row(row)
