"""The contract's verbs over pages, shared by the paged and the mapped backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..contract import NeverFits, OutOfMemory, Prefix, Seq, Usage
from ..geometry import KVGeometry
from ..sequences import ONE, Rows, at_least_one, check_fits, count, named
from .books import PageGroup
from .moves import PageMoves
from .pool import PagePool, check_pool
from .prefix import check_salt, has_runs, unit_keys


class PageAllocator(PageMoves):
    """Sequences over fixed-size pages from one pool.

    Parameters
    ----------
    memory_bytes
        Size of the pool, rounded down to whole pages; None with a ``pool``.
    pool
        Pages that exist already, perhaps shared with other allocators.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        memory_bytes: int | None,
        page_bytes: int,
        groups: Sequence[PageGroup],
        *,
        limit: int | None = None,
        pool: PagePool | None = None,
    ) -> None:
        if (memory_bytes is None) == (pool is None):
            raise ValueError("give either memory_bytes or a pool to draw on")
        if pool is not None:
            check_pool(pool, PagePool)
            if pool.is_physical and not self.attaches:
                raise TypeError(
                    f"the pages of a {type(pool).__name__} are for caches, which map them: give "
                    "books alone a PagePool"
                )
        else:
            pool = PagePool(count("memory_bytes", memory_bytes or 0) // page_bytes)
        limit = None if limit is None else at_least_one("limit", limit)
        super().__init__(geometry, pool, page_bytes, groups, limit)
        self._capacity = self._most_tokens()
        if self._capacity < 1:
            raise ValueError(
                f"one token takes whole pages, {self._num_pages_for(1)} × {page_bytes:,} bytes, "
                f"and there is memory for {pool.num_pages}; give more memory or use smaller pages"
            )

    @property
    def capacity(self) -> int:
        """Most tokens that one sequence alone could store."""
        return self._capacity

    def _most_tokens(self) -> int:
        """Largest ``n`` whose pages, over all columns, are within the pool."""
        low, high = 0, self.pool.num_pages * self.page_bytes
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._num_pages_for(middle) <= self.pool.num_pages
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    # ------------------------------------------------------------------ admission and growth

    def admit(
        self,
        seq: Seq,
        tokens: int,
        *,
        max_new: int | None = None,
        expected_new: int | None = None,
        headroom: int = 0,
        prefix: Prefix | None = None,
        salt: int | str | bytes | None = None,
    ) -> int:
        """Place a prompt; see ``Allocator.admit``. Reserves nothing beyond its pages."""
        tokens = count("tokens", tokens)
        roomy = tokens + count("headroom", headroom)
        if max_new is not None:
            count("max_new", max_new)
        if expected_new is not None:
            count("expected_new", expected_new)
        check_salt(salt)
        self._seqs.require_new(seq)
        check_fits(roomy, self._capacity, self.limit)
        if has_runs(prefix):
            return self._admit_sharing(seq, tokens, roomy, max_new or 0, prefix, salt)
        self._require_free(self._num_pages_for(roomy))
        row = self._choose_row(tokens, max_new or 0)
        self._make_row(row)
        self._place(row, tokens)
        self._enter(seq, row, tokens)
        return 0

    def _admit_sharing(
        self,
        seq: Seq,
        tokens: int,
        roomy: int,
        max_new: int,
        prefix: Prefix,
        salt: int | str | bytes | None,
    ) -> int:
        """Share the full units that are in memory, place the rest, enter the new ones."""
        index = self.prefix_index
        keys = unit_keys(prefix, tokens, index.unit_tokens, salt)
        groups = range(len(self.groups))
        # At least one token is left to compute: its output is the first new token.
        num_hits = index.match(keys[: max(tokens - 1, 0) // index.unit_tokens], len(groups))
        hits = [index.pages(keys[:num_hits], g) for g in groups]
        num_shared = sum(len(pages) for of_group in hits for pages in of_group)
        num_idle = sum(index.num_idle(pages) for of_group in hits for pages in of_group)
        needed = self._num_pages_for(roomy) - num_shared
        self._require_free(needed + num_idle)
        if num_hits:
            row = self._empty_place()
        else:
            row = self._choose_row(tokens, max_new)
            self._make_row(row)
        try:
            for g, of_group in enumerate(hits):
                for pages in of_group:
                    self._share(row, g, int(self._held[g][row]), pages)
            self._place(row, tokens)
        except BaseException:
            self._clear_row(row)
            raise
        self._enter(seq, row, tokens, sealed=num_hits * index.unit_tokens)
        for n, key in enumerate(keys[num_hits:], num_hits):
            for g in groups:
                unit = self._unit_bytes[g] // self.page_bytes
                pages = self._table.of_row(row, self._columns[g], n * unit, (n + 1) * unit)
                index.insert(key, g, pages)
        return num_hits * index.unit_tokens

    def grow(
        self, seqs: Sequence[Seq], tokens: int = 1, *, stop_at_refusal: bool = False
    ) -> dict[Seq, OutOfMemory]:
        """Append tokens; see ``Allocator.grow``. Work is per page crossing, not per token."""
        tokens = count("tokens", tokens)
        rows = self._seqs.rows(seqs)
        if tokens > self._capacity:
            raise NeverFits(f"{tokens} tokens can never fit: the memory holds {self._capacity}")
        lengths = self._length[rows] + (ONE if tokens == 1 else tokens)
        crossing = (lengths > self._covered[rows]).nonzero()[0]
        if crossing.size:
            goals = lengths[crossing].tolist()
            if self.limit is not None and (longest := max(goals)) > self.limit:
                check_fits(longest, longest, self.limit)
            try:
                if self._spares_prefixes(rows[crossing], goals):
                    return self._grow_in_order(seqs, rows, tokens, crossing, stop_at_refusal)
                self._place_more(rows[crossing], goals, tokens)
            except OutOfMemory:
                return self._grow_in_order(seqs, rows, tokens, crossing, stop_at_refusal)
        self._version += 1
        self._length[rows] = lengths
        self._num_tokens += tokens * len(rows)
        if self._windowed:
            for row in rows[crossing].tolist():
                self._leave_behind(row, tokens)
        return {}

    def _spares_prefixes(self, rows: Rows, goals: list[int]) -> bool:
        """Whether a page that a window lets go of, on the way, may save a prefix from eviction."""
        if not self._windowed or len(rows) == 1 or not self.prefix_index.num_cached:
            return False
        num = sum(needed for _, _, needed in map(self._lacking, rows.tolist(), goals))
        return num > self.pool.num_free or self.pool.num_lacking(num) > 0

    def _grow_in_order(
        self, seqs: Sequence[Seq], rows: Rows, tokens: int, crossing: Rows, stop: bool
    ) -> dict[Seq, OutOfMemory]:
        """Serve the crossings of a batch one after the other, then those that need no page."""
        refused: dict[Seq, OutOfMemory] = {}
        left = np.ones(len(rows), np.bool_)
        self._version += 1
        for i in crossing.tolist():
            left[i] = False
            row = rows.item(i)
            length = self._length.item(row) + tokens
            try:
                self._place(row, length)
            except OutOfMemory as refusal:
                refused[seqs[i]] = refusal
                if stop:
                    left[i:] = False
                    break
                continue
            self._length[row] = length
            self._num_tokens += tokens
            if self._windowed:
                self._leave_behind(row, tokens)
        rest = rows[left]
        self._length[rest] += tokens
        self._num_tokens += tokens * len(rest)
        return refused

    def release(self, seq: Seq) -> None:
        """Forget a sequence; pages that nobody else holds become free."""
        if self._seqs.away.pop(named(seq), None) is None:
            self._version += 1
            self._empty(seq)

    # ------------------------------------------------------------------ the books

    def length(self, seq: Seq) -> int:
        """Tokens of a sequence, offloaded or not."""
        away = self._seqs.away.get(named(seq))
        return int(self._length[self._seqs.row(seq)]) if away is None else away.length

    def spans(self, seq: Seq) -> list[tuple[int, int]]:
        """Physical byte intervals of the pages held, in token order, neighbours merged."""
        row = self._seqs.row(seq)
        by_group = [
            self._row_pages(row, g).reshape(group.columns, -1).T.ravel()
            for g, group in enumerate(self.groups)
        ]
        pages = np.concatenate(by_group).astype(np.int64)
        starts = pages[np.diff(pages, prepend=-2) != 1]
        stops = pages[np.diff(pages, append=-2) != 1] + 1
        return [
            (start * self.page_bytes, stop * self.page_bytes)
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]

    def usage(self) -> Usage:
        """The books in bytes; see ``Usage``."""
        reserved = self._num_used * self.page_bytes
        elsewhere = (self._num_gone + self._num_shared) * self.page_bytes
        live = self._num_tokens * self.geometry.bytes_per_token - elsewhere
        free = (self.pool.num_free + self.pool.num_spare) * self.page_bytes
        return Usage(
            capacity=reserved + free,
            live=live,
            reserved=reserved,
            reservation=0,
            tail=reserved - live,
            free=free,
            largest_free=free,
            warm=self.pool.num_spare * self.page_bytes,
            table_bytes=self._table_bytes(),
        )

    def _table_bytes(self) -> int:
        """Bytes of the tables that a kernel reads."""
        raise NotImplementedError
