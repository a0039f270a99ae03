"""The books of page-granular backends: which pages each row holds, and how it comes by them.

Rows are numbers of sequences; the verbs, which take names, are in ``allocator`` and ``moves``.
Backends differ in where the pages are seen (through a block table, or at consecutive virtual
addresses) and in what happens when a page is put under a row (nothing, or driver calls): the
hooks at the end, and in ``leaving`` what becomes of the pages that a row gives up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..contract import Allocator, OutOfMemory, Seq
from ..geometry import KVGeometry
from ..sequences import Ints, SequenceTable, countable, resized
from .pool import PageIds, PagePool
from .prefix import PrefixIndex
from .table import PageTable


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


class PageBooks(Allocator):
    """Rows over fixed-size pages. A page of ``page_bytes`` belongs to one buffer.

    Per row: ``length`` in tokens and ``covered``, the tokens that its pages can take; the
    common step compares these two and touches nothing else. Per row and group, as page
    numbers within the row: ``gone`` (left behind by a window) ≤ ``held`` (in use) ≤
    ``ready`` (in place). Pages between the last two are *warm*: free, but already there.

    A page with several holders is full for all of them and, being sealed (``SequenceTable``),
    never written again. A prefix that a prompt brought is sealed for those who hit it alone: who
    brought it has yet to write it.

    Attributes
    ----------
    attaches : bool
        Pages take work to be put in place (``_attach``, ``_detach``): true of mapped caches.
    """

    attaches = False

    def __init__(
        self,
        geometry: KVGeometry,
        pool: PagePool,
        page_bytes: int,
        groups: Sequence[PageGroup],
        limit: int | None,
    ) -> None:
        self.geometry = geometry
        limit = geometry.max_context if limit is None else limit
        self.limit = None if limit is None else countable("a limit", limit)
        countable("memory", pool.num_pages * page_bytes)
        self.pool = pool
        self.page_bytes = page_bytes
        self.groups = tuple(groups)
        self.num_columns = sum(group.columns for group in groups)
        ends = np.cumsum([group.columns for group in groups]).tolist()
        self._columns = [
            slice(end - group.columns, end) for group, end in zip(groups, ends, strict=True)
        ]
        # Pages are shared and left behind in units that end with a whole token in every group,
        # so that no token of a shared page is ever rewritten.
        unit_tokens = math.lcm(
            *(math.lcm(group.token_bytes, page_bytes) // group.token_bytes for group in groups)
        )
        self._unit_bytes = [unit_tokens * group.token_bytes for group in groups]
        self._windowed = any(group.window is not None for group in groups)
        # Tokens per page where all buffers fill alike and pages hold whole tokens, else None.
        whole = len(groups) == 1 and page_bytes % groups[0].token_bytes == 0
        self._whole_tokens = page_bytes // groups[0].token_bytes if whole else None
        self._seqs = SequenceTable()
        self._length: Ints = np.zeros(0, np.int64)
        self._covered: Ints = np.zeros(0, np.int64)
        self._gone: list[Ints] = [np.zeros(0, np.int64) for _ in groups]
        self._held: list[Ints] = [np.zeros(0, np.int64) for _ in groups]
        self._ready: list[Ints] = [np.zeros(0, np.int64) for _ in groups]
        self._table = PageTable(self.num_columns)
        self.prefix_index = PrefixIndex(unit_tokens)
        self._version: int = 0  # changes with the books; views are built once per version
        self._num_tokens: int = 0
        self._num_gone: int = 0  # pages left behind by windows, of live rows
        self._num_used: int = 0  # distinct pages held by live rows
        self._num_shared: int = 0  # further holders of pages that have one already
        self._num_warm: int = 0
        pool.join(self)

    # ------------------------------------------------------------------ counting

    @property
    def num_spare(self) -> int:
        """Pages that nobody holds but that are kept: they come back when memory is short."""
        return self._num_warm + self.prefix_index.num_cached

    def _pages_for(self, tokens: int, g: int) -> int:
        """``⌈tokens · token_bytes / page_bytes⌉``: pages per column of a group."""
        return -(-tokens * self.groups[g].token_bytes // self.page_bytes)

    def _num_pages_for(self, tokens: int) -> int:
        """Pages over all columns for a sequence of ``tokens`` tokens."""
        num = 0
        for group in self.groups:
            num += -(-tokens * group.token_bytes // self.page_bytes) * group.columns
        return num

    def _require_free(self, num_pages: int) -> None:
        """Refuse what free and spare pages cannot serve, or the system: before any change."""
        if num_pages > self.pool.num_free:
            free = self.pool.num_free + self.pool.num_spare
            if num_pages > free:
                raise OutOfMemory(num_pages, free, free, unit="pages")
        if self.attaches:
            self.pool.secure(num_pages)

    def _row_pages(self, row: int, g: int) -> PageIds:
        """Pages that a row holds in a group, column by column, in token order."""
        gone, held = int(self._gone[g][row]), int(self._held[g][row])
        return self._table.of_row(row, self._columns[g], gone, held)

    def _enter(self, seq: Seq, row: int, tokens: int, sealed: int = 0) -> None:
        """Book a sequence on a row whose pages are in place."""
        self._version += 1
        self._seqs.add(seq, row, sealed=sealed)
        self._length[row] = tokens
        self._num_tokens += tokens

    def _make_row(self, row: int) -> None:
        if row >= len(self._length):
            self._length = resized(self._length, row + 1)
            self._covered = resized(self._covered, row + 1)
            self._table.make_row(row)
            for per_group in (self._gone, self._held, self._ready):
                per_group[:] = [resized(array, row + 1) for array in per_group]

    def check_invariants(self) -> None:
        """Recount everything from the tables and compare with the running books."""
        refs = self.count_refs()
        live = {row for _, row in self._seqs.items()}
        warm: list[int] = []
        num_gone = 0
        for row in range(len(self._length)):
            length = int(self._length[row])
            assert row in live or length == 0, "an idle row has tokens"
            assert length <= self._covered[row] or row not in live, "a token has no page"
            for g, group in enumerate(self.groups):
                gone, held = int(self._gone[g][row]), int(self._held[g][row])
                ready = int(self._ready[g][row])
                assert 0 <= gone <= held <= ready, "page counts out of order"
                assert held == self._pages_for(length, g), "wrong number of pages held"
                warm += self._table.of_row(row, self._columns[g], held, ready).tolist()
                num_gone += gone * group.columns
        self._seqs.check_sealed(self._length)
        used = int((refs > 0).sum())
        assert self._num_used == used, "distinct held pages differ"
        assert self._num_shared == int(refs.sum()) - used, "shared pages differ"
        assert self._num_gone == num_gone, "pages left behind differ"
        assert self._num_tokens == int(self._length.sum()), "token count differs"
        assert len(set(warm)) == len(warm) == self._num_warm, "warm pages differ"
        assert not refs[warm].any(), "a warm page is in use"
        self.prefix_index.check(refs)
        self.pool.check()

    def count_refs(self) -> Ints:
        """References per page by the tables of this allocator."""
        refs = np.zeros(self.pool.num_pages, np.int64)
        for row in range(len(self._length)):
            for g in range(len(self.groups)):
                np.add.at(refs, self._row_pages(row, g), 1)
        return refs

    # ------------------------------------------------------------------ what backends add

    def _choose_row(self, tokens: int, max_new: int = 0) -> int:
        """The row that a new sequence gets: ``tokens`` now, up to ``max_new`` more later."""
        return self._seqs.next_row()

    def _attach(self, row: int, g: int, begin: int, end: int) -> None:
        """Make entries ``begin … end − 1`` of a row's table usable; all or nothing."""

    def _detach(self, row: int, g: int, begin: int, end: int) -> None:
        """Undo ``_attach``."""

    def _scrub(self, pages: PageIds) -> None:
        """Overwrite pages that nobody holds any more, before they are free (if asked to)."""

    def _scrub_rest(self, row: int, g: int, tokens: int, end: int) -> None:
        """Overwrite what lies behind ``tokens`` tokens, up to page ``end`` of a row (if asked to).

        Nobody else holds the pages.
        """

    def _read(self, row: int, g: int, begin: int, end: int) -> Any:
        """A copy of the contents of pages, in host memory; None where there is no tensor."""

    def _write_back(self, row: int, g: int, begin: int, end: int, contents: Any) -> None:
        """Store what ``_read`` returned, into as many pages, perhaps of another row."""

    def give_back(self, num_pages: int) -> None:
        """Return up to that many spare pages to the pool, the least valuable first."""
        evicted = self.prefix_index.evict(num_pages)
        self._scrub(evicted)
        self.pool.put(evicted)
