"""Which page holds which part of which sequence: one table for all rows and buffers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..sequences import Ints, Rows, resized
from .pool import PageIds

Columns = NDArray[np.intp]


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
        self.pages: PageIds = np.zeros((0, num_columns, 8), np.int32)
        self.stamp: Ints = np.zeros(0, np.int64)
        self.clock = 0

    def make_row(self, row: int) -> None:
        """Make room for a row."""
        self.pages = resized(self.pages, row + 1)
        self.stamp = resized(self.stamp, row + 1)

    def of_row(self, row: int, columns: Columns, begin: int, end: int) -> PageIds:
        """Entries ``begin … end − 1`` of a row, column by column."""
        return self.pages[row, columns, begin:end].ravel()

    def of_rows(self, rows: Rows, columns: Columns, begins: Ints, ends: Ints) -> PageIds:
        """Entries ``begins … ends − 1`` of each row: row by row, column by column."""
        sizes = ends - begins
        if len(rows) and sizes.min() == sizes.max() == 1:
            return self.pages[rows[:, None], columns, begins[:, None]].ravel()
        spans = zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True)
        parts = [self.of_row(row, columns, begin, end) for row, begin, end in spans]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def fill(self, rows: Rows, columns: Columns, begins: Ints, ends: Ints, pages: PageIds) -> None:
        """Write the entries that ``of_rows`` reads."""
        sizes = ends - begins
        self._widen(int(ends.max()))
        self.clock += 1
        self.stamp[rows] = self.clock
        if sizes.min() == sizes.max() == 1:
            self.pages[rows[:, None], columns, begins[:, None]] = pages.reshape(len(rows), -1)
            return
        at = 0
        for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
            num = (end - begin) * len(columns)
            self.pages[row, columns, begin:end] = pages[at : at + num].reshape(len(columns), -1)
            at += num

    def fill_next(self, rows: Rows, column: int, ns: Ints, pages: PageIds) -> None:
        """Write one entry ``[row, column, n]`` per row."""
        self._widen(int(ns.max()) + 1)
        self.clock += 1
        self.stamp[rows] = self.clock
        self.pages[rows, column, ns] = pages

    def _widen(self, width: int) -> None:
        rows, columns, old = self.pages.shape
        if width > old:
            more = np.zeros((rows, columns, max(width, 2 * old) - old), np.int32)
            self.pages = np.concatenate([self.pages, more], axis=2)
