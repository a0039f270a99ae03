"""Caches over pages that can go back behind a sliding window, for a crop of the newest tokens."""

from __future__ import annotations

from collections.abc import Sequence

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


class RewindableVmm(Rewindable, VmmKVCache):
    """A mapped cache that can go back."""

    def num_room(self, seqs: Sequence[int]) -> int:
        """Tokens that the pages of each sequence can take."""
        return int(self._covered[self._seqs.rows(seqs)].min())


class RewindablePaged(Rewindable, PagedKVCache):
    """A paged cache that can go back."""
