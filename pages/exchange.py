"""Beams that change places: every sequence takes over another one's tokens, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..contract import Seq
from .moves import PageMoves
from .pool import PageIds


@dataclass(frozen=True)
class _Change:
    """Pages of one row and group that give way, and those that come."""

    row: int
    group: int
    begin: int
    end: int
    old: PageIds
    new: PageIds


def exchange(books: PageMoves, seqs: Sequence[Seq], sources: Sequence[Seq]) -> None:
    """Let each of ``seqs`` have the tokens that its source had before the call.

    Full pages are shared; only those are moved that the two do not share already, so beams that
    descend from one another cost little. Partly filled tails are copied into the pages that the
    sequence has there anyway: nothing is taken from the pool, so nothing can be refused. As after
    a fork, what is there then is written no more by either.

    Parameters
    ----------
    books
        A paged or mapped allocator or cache.
    seqs, sources
        Live sequences, all of one length; a source may serve several.

    Raises
    ------
    KeyError, ValueError
        Unknown sequences, or of different lengths (also after a sliding window: of pages left
        behind); nothing was changed.
    DriverError
        From a mapped cache; nothing was changed.
    """
    with books.pool.lock:
        rows = [books._seqs.row(seq) for seq in seqs]
        origins = [books._seqs.row(seq) for seq in sources]
        pairs = [(row, origin) for row, origin in zip(rows, origins, strict=True) if row != origin]
        if len(set(rows)) != len(rows):
            raise ValueError("a sequence appears twice: name each once (its source may repeat)")
        _require_alike(books, {row for pair in pairs for row in pair})
        changes = [
            change
            for row, origin in pairs
            for g in range(len(books.groups))
            for change in _changes(books, row, origin, g)
        ]
        tails = {origin: _read_tails(books, origin) for _, origin in pairs}
        with ExitStack() as undo:
            _share(books, changes, undo)
            for change in changes:
                _replace(books, change, undo)
            undo.pop_all()
        books._version += 1
        for change in changes:
            books._give_up(change.old)
        for row, origin in pairs:
            books._seqs.sealed[[row, origin]] = books._length[row]
            for g, begin, end, contents in tails[origin]:
                books._write_back(row, g, begin, end, contents)


def _require_alike(books: PageMoves, rows: set[int]) -> None:
    at = list(rows)
    for per_row in (books._length, *books._gone):
        if at and (per_row[at] != per_row[at[0]]).any():
            raise ValueError(
                "sequences of different lengths cannot be exchanged: fork and release them instead"
            )


def _changes(books: PageMoves, row: int, origin: int, g: int) -> list[_Change]:
    """From the first full page on in which two rows differ."""
    columns, begin = books._columns[g], int(books._gone[g][row])
    end = books._own_from(row, g, int(books._length[row]))
    if end <= begin:
        return []
    old = books._table.of_row(row, columns, begin, end).reshape(-1, end - begin)
    new = books._table.of_row(origin, columns, begin, end).reshape(-1, end - begin)
    differing = (old != new).any(axis=0).nonzero()[0]
    if not differing.size:
        return []
    first = int(differing[0])
    pages = old[:, first:].ravel(), new[:, first:].ravel()
    return [_Change(row, g, begin + first, end, *pages)]


def _read_tails(books: PageMoves, row: int) -> list[tuple[int, int, int, Any]]:
    """Group, first and end page, and contents of what a row shares with nobody."""
    length = int(books._length[row])
    spans = [
        (g, books._own_from(row, g, length), int(books._held[g][row]))
        for g in range(len(books.groups))
    ]
    return [(g, at, end, books._read(row, g, at, end)) for g, at, end in spans if end > at]


def _share(books: PageMoves, changes: list[_Change], undo: ExitStack) -> None:
    """One more holder for every page that comes, before any page is given up."""
    for change in changes:
        books.pool.share(change.new)
        books._num_shared += len(change.new)
        undo.callback(books._give_up, change.new)


def _replace(books: PageMoves, change: _Change, undo: ExitStack) -> None:
    """Put the new pages where the old ones are."""
    columns = books._columns[change.group]
    row, begin, end = change.row, change.begin, change.end
    books._detach(row, change.group, begin, end)
    undo.callback(books._attach, row, change.group, begin, end)
    books._table.fill(row, columns, begin, end, change.new)
    undo.callback(books._table.fill, row, columns, begin, end, change.old)
    books._attach(row, change.group, begin, end)
    undo.callback(books._detach, row, change.group, begin, end)
