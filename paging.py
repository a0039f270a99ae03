"""Bookkeeping in pages, shared by the paged and the mapped backend: who holds which page.

Both backends give a sequence whole pages from one pool; they differ in where the pages are
seen (through a block table, or at consecutive virtual addresses) and in what happens when a
page is put under a sequence (nothing, or driver calls). The latter are the hooks ``_attach``
and ``_detach``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from .contract import Allocator, OutOfMemory, Seq, Usage
from .geometry import KVGeometry
from .page_table import PageTable
from .pages import PageIds, PagePool
from .sequences import Ints, Rows, SequenceTable, check_fits, count, resized


@dataclass(frozen=True)
class PageGroup:
    """Buffers that fill at the same pace: they cross a page boundary at the same token.

    Attributes
    ----------
    layers : tuple of int
        The layers stored here.
    columns : int
        Buffers in the group; each crossing takes one page for each.
    token_bytes : int
        Bytes that one token takes in one of the buffers.
    window : int | None
        Sliding window in tokens: pages that fell out of it are given back.
    """

    layers: tuple[int, ...]
    columns: int
    token_bytes: int
    window: int | None = None


class PageAllocator(Allocator):
    """Sequences over fixed-size pages. A page of ``page_bytes`` belongs to one buffer.

    Per row: ``length`` in tokens and ``covered``, the tokens that its pages can take; the
    common step compares these two and touches nothing else. Per row and group, as page
    numbers within the sequence: ``gone`` (left behind by a window) ≤ ``held`` (in use) ≤
    ``ready`` (in place). Pages between the last two are *warm*: free, but already there.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        memory_bytes: int,
        page_bytes: int,
        groups: Sequence[PageGroup],
        *,
        limit: int | None = None,
        pool: PagePool | None = None,
    ) -> None:
        self.geometry = geometry
        self.limit = geometry.max_context if limit is None else count("limit", limit)
        self.page_bytes = page_bytes
        self.groups = tuple(groups)
        self.pool = pool or PagePool(count("memory_bytes", memory_bytes) // page_bytes)
        self.num_columns = sum(group.columns for group in groups)
        self._capacity = self._most_tokens()
        if self._capacity < 1:
            raise ValueError(
                f"{memory_bytes} bytes do not hold one page of {page_bytes} bytes for each of "
                f"{self.num_columns} buffers; give more memory or use smaller pages"
            )
        ends = np.cumsum([group.columns for group in groups]).tolist()
        self._columns = [
            np.arange(end - group.columns, end) for group, end in zip(groups, ends, strict=True)
        ]
        self._seqs = SequenceTable()
        self._length: Ints = np.zeros(0, np.int64)
        self._covered: Ints = np.zeros(0, np.int64)
        self._gone: list[Ints] = [np.zeros(0, np.int64) for _ in groups]
        self._held: list[Ints] = [np.zeros(0, np.int64) for _ in groups]
        self._ready: list[Ints] = [np.zeros(0, np.int64) for _ in groups]
        self._table = PageTable(self.num_columns)
        self._version = 0  # changes with the books; views are built once per version
        self._num_tokens = 0
        self._num_gone = 0  # pages left behind by windows, of live sequences
        self._num_used = 0  # distinct pages held by live sequences
        self._num_shared = 0  # further holders of pages that have one already
        self._num_warm = 0

    # ------------------------------------------------------------------ the contract

    @property
    def capacity(self) -> int:
        """Most tokens that one sequence alone could store."""
        return self._capacity

    def admit(
        self,
        seq: Seq,
        tokens: int,
        *,
        max_new: int | None = None,
        expected_new: int | None = None,
        headroom: int = 0,
    ) -> int:
        """Place a prompt; see ``Allocator.admit``. Reserves nothing beyond its pages."""
        tokens = count("tokens", tokens)
        roomy = tokens + count("headroom", headroom)
        self._seqs.require_new(seq)
        check_fits(roomy, self._capacity, self.limit)
        self._require_free(self._num_pages_for(roomy))
        row = self._choose_row(tokens)
        self._make_row(row)
        self._place(np.array([row]), np.array([tokens]))
        self._version += 1
        self._seqs.add(seq, row)
        self._length[row] = tokens
        self._num_tokens += tokens
        return 0

    def grow(
        self, seqs: Sequence[Seq], tokens: int = 1, *, stop_at_refusal: bool = False
    ) -> dict[Seq, OutOfMemory]:
        """Append tokens; see ``Allocator.grow``. Work is per page crossing, not per token."""
        tokens = count("tokens", tokens)
        rows = self._seqs.rows(seqs)
        self._version += 1
        lengths = self._length[rows] + tokens
        crossing = (lengths > self._covered[rows]).nonzero()[0]
        if crossing.size:
            if self.limit is not None:
                check_fits(int(lengths.max()), int(lengths.max()), self.limit)
            try:
                self._place(rows[crossing], lengths[crossing])
            except OutOfMemory:
                return self._grow_in_order(seqs, rows, lengths, stop_at_refusal)
        self._length[rows] = lengths
        self._num_tokens += tokens * len(rows)
        if crossing.size:
            self._leave_behind(rows[crossing], tokens)
        return {}

    def release(self, seq: Seq) -> None:
        """Forget a sequence; pages that nobody else holds become free."""
        row = self._seqs.remove(seq)
        self._version += 1
        self._num_tokens -= int(self._length[row])
        self._length[row] = self._covered[row] = 0
        self._empty_row(row)

    def length(self, seq: Seq) -> int:
        """Tokens of a sequence."""
        return int(self._length[self._seqs.row(seq)])

    def spans(self, seq: Seq) -> list[tuple[int, int]]:
        """Physical byte intervals of the pages held, buffer by buffer, neighbours merged."""
        row = self._seqs.row(seq)
        spans: list[tuple[int, int]] = []
        for g in range(len(self.groups)):
            for page in self._row_pages(row, g).tolist():
                start, stop = page * self.page_bytes, (page + 1) * self.page_bytes
                if spans and spans[-1][1] == start:
                    start = spans.pop()[0]
                spans.append((start, stop))
        return spans

    def usage(self) -> Usage:
        """The books in bytes; see ``Usage``."""
        reserved = self._num_used * self.page_bytes
        elsewhere = (self._num_gone + self._num_shared) * self.page_bytes
        live = self._num_tokens * self.geometry.bytes_per_token - elsewhere
        capacity = self.pool.num_pages * self.page_bytes
        return Usage(
            capacity=capacity,
            live=live,
            reserved=reserved,
            reservation=0,
            tail=reserved - live,
            free=capacity - reserved,
            largest_free=capacity - reserved,
            warm=self._num_warm * self.page_bytes,
            table_bytes=self._table_bytes(),
        )

    def check_invariants(self) -> None:
        """Recount everything from the tables and compare with the running books."""
        refs = np.zeros(self.pool.num_pages, np.int64)
        live = {row for _, row in self._seqs.items()}
        warm: list[int] = []
        num_gone = 0
        for row in range(len(self._length)):
            length = self._length[row : row + 1]
            assert row in live or length[0] == 0, "an idle row has tokens"
            assert length[0] <= self._covered[row] or row not in live, "a token has no page"
            for g, group in enumerate(self.groups):
                gone, held = int(self._gone[g][row]), int(self._held[g][row])
                ready = int(self._ready[g][row])
                assert 0 <= gone <= held <= ready, "page counts out of order"
                assert held == self._pages_for(length, g)[0], "wrong number of pages held"
                np.add.at(refs, self._row_pages(row, g), 1)
                warm += self._table.of_row(row, self._columns[g], held, ready).tolist()
                num_gone += gone * group.columns
        self.pool.check(refs)
        used = int((refs > 0).sum())
        assert self._num_used == used, "distinct held pages differ"
        assert self._num_shared == int(refs.sum()) - used, "shared pages differ"
        assert self._num_gone == num_gone, "pages left behind differ"
        assert self._num_tokens == int(self._length.sum()), "token count differs"
        assert len(set(warm)) == len(warm) == self._num_warm, "warm pages differ"
        assert not refs[warm].any(), "a warm page is in use"
        assert self.pool.num_free + used + self._num_warm == self.pool.num_pages, "a page is lost"

    # ------------------------------------------------------------------ placing pages

    def _place(self, rows: Rows, lengths: Ints) -> None:
        """Put pages for ``lengths`` tokens under ``rows``: under all of them, or under none."""
        begins = [held[rows] for held in self._held]
        ends = [np.maximum(self._pages_for(lengths, g), b) for g, b in enumerate(begins)]
        needed = sum(
            int((end - begin).sum()) * group.columns
            for group, begin, end in zip(self.groups, begins, ends, strict=True)
        )
        self._require_free(needed)
        warm_ends = self._adopt(rows, begins, ends) if self._num_warm else begins
        try:
            self._add_fresh(rows, warm_ends, ends)
        except BaseException:
            self._abandon(rows, begins, warm_ends)
            raise
        self._num_used += needed
        covered = self._set_held(rows, ends)
        if self.limit is not None:
            covered = np.minimum(covered, self.limit)
        self._covered[rows] = covered

    def _set_held(self, rows: Rows, ends: list[Ints]) -> Ints:
        """Book the page counts of ``rows``; returns the tokens that they can take."""
        covered: Ints | None = None
        for g, (group, end) in enumerate(zip(self.groups, ends, strict=True)):
            self._held[g][rows] = end
            self._ready[g][rows] = np.maximum(end, self._ready[g][rows])
            tokens = end * self.page_bytes // group.token_bytes
            covered = tokens if covered is None else np.minimum(covered, tokens)
        assert covered is not None
        return covered

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
        undo = ExitStack()
        with undo:
            for g, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                num = int((end - begin).sum()) * self.groups[g].columns
                if num == 0:
                    continue
                if num > self.pool.num_free:
                    self._reclaim(num - self.pool.num_free)
                pages = self.pool.take(num)
                undo.callback(self._put_back, pages)
                self._table.fill(rows, self._columns[g], begin, end, pages)
                self._attach(rows, g, begin, end)
                undo.callback(self._detach, rows, g, begin, end)
            undo.pop_all()

    def _grow_in_order(
        self, seqs: Sequence[Seq], rows: Rows, lengths: Ints, stop: bool
    ) -> dict[Seq, OutOfMemory]:
        """Serve a batch that does not fit as a whole, one sequence at a time."""
        refused: dict[Seq, OutOfMemory] = {}
        tokens = lengths - self._length[rows]
        for i, seq in enumerate(seqs):
            row = rows[i : i + 1]
            try:
                if lengths[i] > self._covered[rows[i]]:
                    self._place(row, lengths[i : i + 1])
            except OutOfMemory as refusal:
                refused[seq] = refusal
                if stop:
                    break
                continue
            self._length[row] = lengths[i]
            self._num_tokens += int(tokens[i])
            self._leave_behind(row, int(tokens[i]))
        return refused

    def _leave_behind(self, rows: Rows, tokens: int) -> None:
        """Give back pages that no query of the newest ``tokens`` tokens can see any more."""
        for g, group in enumerate(self.groups):
            if group.window is None:
                continue
            first = np.maximum(self._length[rows] - tokens + 1 - group.window, 0)
            ends = np.maximum(first * group.token_bytes // self.page_bytes, self._gone[g][rows])
            for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
                begin = int(self._gone[g][row])
                if end > begin:
                    self._detach(np.array([row]), g, np.array([begin]), np.array([end]))
                    self._give_up(self._table.of_row(row, self._columns[g], begin, end))
                    self._gone[g][row] = end
                    self._num_gone += (end - begin) * group.columns

    def _put_back(self, pages: PageIds) -> None:
        self.pool.put(self.pool.drop(pages))

    def _give_up(self, pages: PageIds) -> None:
        """Drop one reference to each page; those without any go back to the pool."""
        dead = self.pool.drop(pages)
        self._num_used -= len(dead)
        self._num_shared -= len(pages) - len(dead)
        self.pool.put(dead)

    # ------------------------------------------------------------------ rows and tables

    def _pages_for(self, tokens: Ints, g: int) -> Ints:
        """``⌈tokens · token_bytes / page_bytes⌉``: pages per column of a group."""
        return -(-tokens * self.groups[g].token_bytes // self.page_bytes)

    def _num_pages_for(self, tokens: int) -> int:
        """Pages over all columns for a sequence of ``tokens`` tokens."""
        return sum(
            -(-tokens * group.token_bytes // self.page_bytes) * group.columns
            for group in self.groups
        )

    def _require_free(self, num_pages: int) -> None:
        free = self.pool.num_free + self._num_warm
        if num_pages > free:
            raise OutOfMemory(num_pages, free, free, unit="pages")

    def _most_tokens(self) -> int:
        """Largest ``n`` whose pages, over all columns, are within the pool."""
        low, high = 0, self.pool.num_pages * self.page_bytes
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._num_pages_for(middle) <= self.pool.num_pages
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _row_pages(self, row: int, g: int) -> PageIds:
        """Pages that a row holds in a group, column by column, in token order."""
        gone, held = int(self._gone[g][row]), int(self._held[g][row])
        return self._table.of_row(row, self._columns[g], gone, held)

    def _make_row(self, row: int) -> None:
        if row >= len(self._length):
            self._length = resized(self._length, row + 1)
            self._covered = resized(self._covered, row + 1)
            self._table.make_row(row)
            for per_group in (self._gone, self._held, self._ready):
                per_group[:] = [resized(array, row + 1) for array in per_group]

    # ------------------------------------------------------------------ what backends add

    def _choose_row(self, tokens: int) -> int:
        """The row that a sequence of ``tokens`` tokens gets."""
        raise NotImplementedError

    def _empty_row(self, row: int) -> None:
        """Take the pages out of the row of a released sequence."""
        raise NotImplementedError

    def _table_bytes(self) -> int:
        """Bytes of the tables that a kernel reads."""
        raise NotImplementedError

    def _attach(self, rows: Rows, g: int, begins: Ints, ends: Ints) -> None:
        """Make table entries ``begins … ends − 1`` of each row usable; atomic."""

    def _detach(self, rows: Rows, g: int, begins: Ints, ends: Ints) -> None:
        """Undo ``_attach``."""

    def _reclaim(self, num_pages: int) -> None:
        """Return that many warm pages to the pool; there are enough."""
