"""Copying, cutting and moving sequences over pages: fork, truncate, offload, restore."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..contract import Seq
from ..sequences import check_fits, count
from .placing import PagePlacing
from .pool import PageIds


@dataclass(frozen=True)
class _Away:
    """A sequence in host memory: what its pages held, by group."""

    length: int
    sealed: int
    gone: list[int]
    contents: list[Any]


class PageMoves(PagePlacing):
    """The verbs of ``Allocator`` that copy, cut and move."""

    def fork(self, parent: Seq, child: Seq) -> None:
        """Copy a sequence; full pages are shared, the partly filled tail is copied."""
        source = self._seqs.row(parent)
        self._seqs.require_new(child)
        length = int(self._length[source])
        begins = [int(gone[source]) for gone in self._gone]
        own = [self._own_from(source, g, length) for g in range(len(self.groups))]
        self._require_free(
            sum(
                (int(held[source]) - start) * group.columns
                for held, start, group in zip(self._held, own, self.groups, strict=True)
            )
        )
        row = self._empty_place()
        try:
            self._set_gone(row, begins)
            for g, (begin, end) in enumerate(zip(begins, own, strict=True)):
                if end > begin:
                    pages = self._table.of_row(source, self._columns[g], begin, end)
                    self._share(row, g, begin, pages)
            self._place(row, length)
            for g, begin in enumerate(own):
                end = int(self._held[g][source])
                if end > begin:
                    self._write_back(row, g, begin, end, self._read(source, g, begin, end))
        except BaseException:
            self._clear_row(row)
            raise
        self._enter(child, row, length, sealed=length)
        self._seqs.sealed[source] = length

    def _own_from(self, row: int, g: int, tokens: int) -> int:
        """First page of the last, partly filled unit: from there on a row shares nothing."""
        unit = self._unit_bytes[g]
        full = tokens * self.groups[g].token_bytes // unit * unit // self.page_bytes
        return max(full, int(self._gone[g][row]))

    def _set_gone(self, row: int, begins: list[int]) -> None:
        """Begin an empty row after the pages that a window left behind."""
        for g, begin in enumerate(begins):
            self._gone[g][row] = self._held[g][row] = self._ready[g][row] = begin
            self._num_gone += begin * self.groups[g].columns

    def truncate(self, seq: Seq, tokens: int) -> None:
        """Keep the first ``tokens`` tokens; cutting into a shared page takes a copy of it."""
        row, tokens = self._seqs.row(seq), count("tokens", tokens)
        length = int(self._length[row])
        if tokens > length:
            raise ValueError(f"cannot keep {tokens} tokens of sequence {seq!r}: it has {length}")
        self._require_window(row, tokens)
        if tokens == length:
            return
        own = [self._own_from(row, g, tokens) for g in range(len(self.groups))]
        ends = [self._pages_for(tokens, g) for g in range(len(self.groups))]
        shared = [
            g
            for g, (begin, end) in enumerate(zip(own, ends, strict=True))
            if self._is_wanted(row, g, begin, end)
        ]
        self._require_free(sum((ends[g] - own[g]) * self.groups[g].columns for g in shared))
        self._version += 1
        with ExitStack() as undo:
            old = [self._make_own(row, g, own[g], ends[g], undo) for g in shared]
            self._retire_tails(row, dict(enumerate(ends)))  # the last that may fail
            undo.pop_all()
        for pages in old:
            self._num_used += len(pages)
            self._give_up(pages)
        for g, end in enumerate(ends):
            self._scrub_rest(row, g, tokens, end)
        self._set_held(row, ends)
        self._num_tokens -= length - tokens
        self._length[row] = tokens
        self._seqs.unseal(row, tokens)

    def _make_own(self, row: int, g: int, begin: int, end: int, undo: ExitStack) -> PageIds:
        """Put copies in the place of shared pages; returns those, which are held still."""
        at, columns = (row, g, begin, end), self._columns[g]
        old = self._table.of_row(row, columns, begin, end)
        contents = self._read(row, g, begin, end)
        fresh = self._take(len(old))
        undo.callback(self._put_back, fresh)
        self._detach(*at)
        undo.callback(self._attach, *at)
        self._table.fill(row, columns, begin, end, fresh)
        undo.callback(self._table.fill, row, columns, begin, end, old)
        self._attach(*at)
        undo.callback(self._detach, *at)
        self._write_back(row, g, begin, end, contents)
        return old

    def _require_window(self, row: int, tokens: int) -> None:
        """Refuse a cut after which the next token could not see its whole window."""
        for g, group in enumerate(self.groups):
            first = -(-int(self._gone[g][row]) * self.page_bytes // group.token_bytes)
            if group.window is not None and first > max(0, tokens + 1 - group.window):
                raise ValueError(
                    f"cannot keep {tokens} tokens: the window of {group.window} has let go of "
                    f"the first {first}; keep at least {first + group.window - 1}"
                )

    def offload(self, seq: Seq) -> None:
        """Move a sequence to host memory; its pages become free."""
        row = self._seqs.row(seq)
        away = _Away(
            int(self._length[row]),
            self._seqs.sealed.item(row),
            [int(gone[row]) for gone in self._gone],
            [
                self._read(row, g, int(self._gone[g][row]), int(self._held[g][row]))
                for g in range(len(self.groups))
            ],
        )
        self._version += 1
        self._empty(seq)
        self._seqs.away[seq] = away

    def restore(self, seq: Seq, *, headroom: int = 0) -> None:
        """Bring an offloaded sequence back; see ``Allocator.restore``."""
        away = self._seqs.offloaded(seq)
        roomy = away.length + count("headroom", headroom)
        gone = sum(g * group.columns for g, group in zip(away.gone, self.groups, strict=True))
        needed = self._num_pages_for(roomy) - gone
        check_fits(roomy, roomy if needed <= self.pool.num_pages else self.capacity, self.limit)
        self._require_free(needed)
        row = self._empty_place() if gone else self._choose_row(away.length)
        self._make_row(row)
        if gone:
            self._set_gone(row, away.gone)
        try:
            self._place(row, away.length)
            for g, (begin, contents) in enumerate(zip(away.gone, away.contents, strict=True)):
                end = int(self._held[g][row])
                if end > begin:
                    self._write_back(row, g, begin, end, contents)
        except BaseException:
            self._clear_row(row)
            raise
        del self._seqs.away[seq]
        self._enter(seq, row, away.length, away.sealed)

    def _empty(self, seq: Seq) -> None:
        """Take a sequence off its row; an error of the driver leaves it there, unchanged."""
        row = self._seqs.row(seq)
        self._empty_row(row)
        self._seqs.remove(seq)
        self._num_tokens -= self._length.item(row)
        self._length[row] = self._covered[row] = 0
