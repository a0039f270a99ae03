"""Which page holds which part of which sequence: one table for all rows and buffers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..sequences import Ints, Rows, resized
from .pool import PageIds

RowPages = NDArray[np.int32]
"""Page numbers of a part of a row, ``[column, n]``."""


class PageTable:
    """Page numbers ``[row, column, n]``: the n-th page of a row in one buffer (column).

    Attributes
    ----------
    pages : int32 array
        The table itself. Entries outside a row's pages are undefined.
    stamp : int64 array
        Per row, ``clock`` at its last change, so that copies of rows can be kept up to date.
    """

    def __init__(self, num_columns: int) -> None:
        self.pages: NDArray[np.int32] = np.zeros((0, num_columns, 8), np.int32)
        self.stamp: Ints = np.zeros(0, np.int64)
        self.clock = 0

    def make_row(self, row: int) -> None:
        """Make room for a row."""
        self.pages = resized(self.pages, row + 1)
        self.stamp = resized(self.stamp, row + 1)

    def of_row(self, row: int, columns: slice, begin: int, end: int) -> PageIds:
        """A copy of entries ``begin … end − 1`` of a row, column by column."""
        return self.pages[row, columns, begin:end].reshape(-1).astype(np.intp)

    def view_of_row(self, row: int, columns: slice, begin: int, end: int) -> RowPages:
        """The same entries ``[columns, n]`` without a copy: until the table changes."""
        return self.pages[row, columns, begin:end]

    def fill(self, row: int, columns: slice, begin: int, end: int, pages: PageIds) -> None:
        """Write the entries that ``of_row`` reads."""
        if end > self.pages.shape[2]:
            self._widen(end)
        self.clock += 1
        self.stamp[row] = self.clock
        self.pages[row, columns, begin:end] = pages.reshape(-1, end - begin)

    def of_rows(self, rows: Rows, ns: Ints) -> PageIds:
        """A copy of all columns' ``n``-th entry of each row: row by row."""
        return self.pages[rows, :, ns].reshape(-1).astype(np.intp)

    def fill_rows(self, rows: Rows, ns: Ints, pages: PageIds) -> None:
        """Write the entries that ``of_rows`` reads."""
        if (end := max(ns.tolist()) + 1) > self.pages.shape[2]:
            self._widen(end)
        self.clock += 1
        self.stamp[rows] = self.clock
        self.pages.transpose(0, 2, 1)[rows, ns] = pages.reshape(len(rows), -1)

    def _widen(self, width: int) -> None:
        rows, columns, old = self.pages.shape
        more = np.zeros((rows, columns, max(width, 2 * old) - old), np.int32)
        self.pages = np.concatenate([self.pages, more], axis=2)
