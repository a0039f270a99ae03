"""The live sequences of an allocator, numbered by rows of arrays, and the checks they share.

A name may be any hashable value; the arrays of an allocator are indexed by row, so that the
common step of a batch touches no Python object per sequence beyond one dictionary lookup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import filterfalse
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .contract import NeverFits, Seq

MOST = 1 << 62
"""Most bytes of a memory, most tokens of a limit: the arrays of the books are int64."""
Rows = NDArray[np.intp]
Ints = NDArray[np.int64]
ONE: Ints = np.array(1)
"""Adding this to a short array takes half the time of adding a Python integer."""


class SequenceTable:
    """Names of sequences; rows of the live ones. Freed rows are reused last in, first out.

    Attributes
    ----------
    away : dict
        Offloaded sequences, and what it takes to bring each back. They have no row.
    sealed : int64 array
        Per row, how many leading tokens somebody else may read as well (since a fork or a prefix
        hit): they are never written again. 0 for free rows.
    """

    def __init__(self) -> None:
        self.away: dict[Seq, Any] = {}
        self._row_of: dict[Seq, int] = {}
        self._free_rows: list[int] = []
        self.sealed: Ints = np.zeros(0, np.int64)
        self.num_rows = 0
        """Rows ever used: arrays need at least this many entries."""
        self._no_rows: Rows = np.zeros(0, np.intp)
        self._last_seqs: list[Seq] = []
        self._last_rows = self._no_rows

    def __len__(self) -> int:
        return len(self._row_of)

    def __iter__(self) -> Iterator[Seq]:
        return iter(self._row_of)

    def items(self) -> Iterator[tuple[Seq, int]]:
        """Live sequences with their rows, in order of admission."""
        return iter(self._row_of.items())

    @property
    def free_rows(self) -> list[int]:
        """Rows used before and free now, in order of release."""
        return self._free_rows

    def next_row(self) -> int:
        """The row that ``add`` gives when it is not told one."""
        return self._free_rows[-1] if self._free_rows else self.num_rows

    def add(self, seq: Seq, row: int | None = None, *, sealed: int = 0) -> int:
        """Give a sequence a row: the free one named, or ``next_row``. Returns it."""
        if row is None:
            row = self.next_row()
        if row == self.num_rows:
            self.num_rows += 1
        elif self._free_rows[-1] == row:
            self._free_rows.pop()
        else:
            self._free_rows.remove(row)
        self._row_of[seq] = row
        self.sealed = resized(self.sealed, row + 1)
        self.sealed[row] = sealed
        return row

    def remove(self, seq: Seq) -> int:
        """Forget a sequence; returns its row, which ``add`` may hand out again."""
        row = self.row(seq)
        del self._row_of[seq]
        self._last_seqs, self._last_rows = [], self._no_rows
        self._free_rows.append(row)
        self.sealed[row] = 0
        return row

    def row(self, seq: Seq) -> int:
        """Row of a live sequence."""
        try:
            return self._row_of[seq]
        except (KeyError, TypeError):
            raise self._without_row(seq) from None

    def rows(self, seqs: Sequence[Seq]) -> Rows:
        """Rows of distinct live sequences. A batch that asks again is answered from memory."""
        if type(seqs) is list and seqs == self._last_seqs:
            return self._last_rows
        require_batch(seqs)
        names, row_of = list(seqs), self._row_of
        if names == list(row_of):  # all of them, in order of admission
            rows = np.fromiter(row_of.values(), np.intp, len(row_of))
        else:
            try:
                rows = np.array([row_of[seq] for seq in names], np.intp)
            except KeyError as error:
                raise self._without_row(error.args[0]) from None
            except TypeError:
                raise self._without_row(next(filterfalse(_hashable, names))) from None
            if len(set(names)) != len(rows):
                raise ValueError("a sequence appears twice in one batch; name each once")
        self._last_seqs, self._last_rows = names, rows
        return rows

    def unseal(self, row: int, tokens: int) -> None:
        """A row was cut to ``tokens`` tokens: what comes behind them is its own."""
        self.sealed[row] = min(self.sealed.item(row), tokens)

    def check_sealed(self, lengths: Ints) -> None:
        """Raise ``AssertionError`` unless each live row is sealed within its length, others not."""
        sealed, live = self.sealed.copy(), list(self._row_of.values())
        assert ((sealed[live] >= 0) & (sealed[live] <= lengths[live])).all(), "sealed too far"
        sealed[live] = 0
        assert not sealed.any(), "a free row is sealed"

    def require_new(self, seq: Seq) -> None:
        """Refuse a name that a sequence has."""
        if named(seq) in self._row_of:
            raise ValueError(f"sequence {seq!r} is live already; release it or use another name")
        if seq in self.away:
            raise ValueError(f"sequence {seq!r} is offloaded: restore or release it first")

    def offloaded(self, seq: Seq) -> Any:
        """What brings an offloaded sequence back."""
        if named(seq) not in self.away:
            self.row(seq)
            raise ValueError(f"sequence {seq!r} is not offloaded")
        return self.away[seq]

    def _without_row(self, seq: Seq) -> KeyError | ValueError:
        if named(seq) in self.away:
            return ValueError(f"sequence {seq!r} is offloaded: restore it first")
        return KeyError(f"sequence {seq!r} is not live: never admitted, or released already")


def require_batch(seqs: object) -> None:
    """Refuse what cannot be read twice in the same order: generators, sets, views of dicts.

    One name is no batch either: a string would be taken for its letters.
    """
    if type(seqs) is list:
        return
    if isinstance(seqs, str | bytes):
        raise TypeError(f"a batch is a list of sequences: write [{seqs!r}]")
    if not isinstance(seqs, Sequence) and not (isinstance(seqs, np.ndarray) and seqs.ndim == 1):
        raise TypeError(f"a batch is a list of sequences, not {type(seqs).__name__}")


def named(seq: Seq) -> Seq:
    """Return the name of a sequence, refusing what no table can look up."""
    if not _hashable(seq):
        raise TypeError(f"a sequence is named by a string, a number or the like, not {seq!r}")
    return seq


def _hashable(seq: object) -> bool:
    try:
        hash(seq)
    except TypeError:
        return False
    return True


def count(name: str, value: int) -> int:
    """Return ``value`` as a plain int, refusing what is not a count (negative, float, bool)."""
    if type(value) is int and value >= 0:
        return value
    if (counted := whole(name, value)) < 0:
        raise ValueError(f"{name} must not be negative, but is {counted}")
    return counted


def whole(name: str, value: int) -> int:
    """Return ``value`` as a plain int, refusing what is none (float, bool, text)."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None


def number(name: str, value: float) -> float:
    """Return ``value`` as a plain float, refusing what is no number (bool, text)."""
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, not {value!r}")
    return float(value)


def at_least_one(name: str, value: int) -> int:
    """Return ``value`` as a plain int, refusing what is not a count of one or more."""
    if (least := count(name, value)) < 1:
        raise ValueError(f"{name} must be at least 1, not {least}")
    return least


def flag(name: str, value: bool) -> bool:
    """Return ``value`` as a plain bool, refusing what only counts as one (None, 0, ``"no"``)."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def countable(what: str, number: int) -> int:
    """Return a number of bytes or tokens, refusing one whose sums int64 might not hold."""
    if number > MOST:
        raise ValueError(f"{what} of {number} is more than the books count: give at most 2^62")
    return number


def check_fits(tokens: int, capacity: int, limit: int | None) -> None:
    """Tell at once about a sequence that could never be stored whole."""
    if tokens > capacity:
        raise NeverFits(f"{tokens} tokens can never fit: the whole memory holds {capacity}")
    if limit is not None and tokens > limit:
        raise NeverFits(f"{tokens} tokens are beyond the limit of {limit} per sequence")


def resized(array: NDArray[Any], num_rows: int) -> NDArray[Any]:
    """``array`` with its first axis at least doubled, by zeros, to hold ``num_rows``."""
    if num_rows <= len(array):
        return array
    grown = np.zeros((max(num_rows, 2 * len(array), 8), *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown
