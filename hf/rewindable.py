"""Caches over pages that can go back behind a sliding window, for a crop of the newest tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..contract import Seq
from ..paged import PagedKVCache
from ..pages.moves import PageMoves
from ..vmm import VmmKVCache


class Rewindable(PageMoves):
    """Keeps the pages behind a sliding window for as long as a crop may go back to them.

    Attributes
    ----------
    floor : int | None
        What the tokens from this one on can see stays; None: what the newest ones can see.
    """

    floor: int | None = None

    def _leave_behind(self, row: int, tokens: int) -> None:
        if self.floor is not None:
            tokens = max(tokens, int(self._length[row]) - self.floor)
        super()._leave_behind(row, tokens)

    def check_cut(self, seqs: Sequence[Seq], tokens: int) -> None:
        """Refuse to cut sequences to ``tokens`` tokens, one after the other, unless all can be.

        A cut into a page that others hold takes a copy; the last holder needs none, and what it
        gives up behind the cut is free for those that come after it.

        Raises
        ------
        ValueError
            A window has let go of what the next token would see.
        OutOfMemory
            Not every sequence that needs a copy could have it.
        """
        rows = self._seqs.rows(seqs).tolist()
        for row in rows:
            self._require_window(row, tokens)
        if not self._num_shared and not self.prefix_index.num_entries:
            return
        refs = self.pool.refs(np.arange(self.pool.num_pages))
        needed = taken = 0
        for row in rows:
            left = []
            for g, columns in enumerate(self._columns):
                begin, end = self._own_from(row, g, tokens), self._pages_for(tokens, g)
                cut = self._table.of_row(row, columns, begin, end)
                if (refs[cut] > 1).any() or self.prefix_index.holds(cut):
                    taken += len(cut)
                    left.append(cut)
                left.append(self._table.of_row(row, columns, end, int(self._held[g][row])))
            needed = max(needed, taken)
            for pages in left:
                refs[pages] -= 1
                taken -= int((refs[pages] == 0).sum())
        self._require_free(needed)


class RewindableVmm(Rewindable, VmmKVCache):
    """A mapped cache that can go back."""

    def num_room(self, seqs: Sequence[int]) -> int:
        """Tokens that the pages of each sequence can take."""
        return int(self._covered[self._seqs.rows(seqs)].min())

    @property
    def is_closing(self) -> bool:
        """Whether ``close`` came so far that nothing can be stored any more."""
        return not self._space.k


class RewindablePaged(Rewindable, PagedKVCache):
    """A paged cache that can go back."""
