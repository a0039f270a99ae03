"""Columns of a trace while it is read: checked cell by cell, sorted or refused at the end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ..trace import MISSING, TICKS, Ints, Runs, Trace, Unit
from .source import Source


class Columns:
    """The requests read so far.

    Parameters
    ----------
    source
        Where they come from, for error messages.
    unit
        ``"s"`` collects ticks of 100 ns in ``arrival``, ``"step"`` steps.
    ordered
        True for our own formats: rows out of order are an error, not a notice.
    """

    def __init__(self, source: Source, unit: Unit, *, ordered: bool = False) -> None:
        self.source = source
        self.unit: Unit = unit
        self.ordered = ordered
        self.arrival, self.prompt, self.output = array("q"), array("q"), array("q")
        self.max_new, self.line = array("q"), array("q")
        self.prefix: list[Runs] | None = None
        self.notices: list[str] = []
        self.failed = self.skipped = 0

    def __len__(self) -> int:
        return len(self.prompt)

    def add(
        self, line: int, arrival: int, prompt: int, output: int, max_new: int = MISSING
    ) -> None:
        """Append one request, its values checked already."""
        self.line.append(line)
        self.arrival.append(arrival)
        self.prompt.append(prompt)
        self.output.append(output)
        self.max_new.append(max_new)

    def extend(
        self, line: Sequence[int], arrival: Ints, prompt: Ints, output: Ints, max_new: Ints
    ) -> None:
        """Append a block of requests, their values checked already."""
        self.line.extend(line)
        for column, values in (
            (self.arrival, arrival),
            (self.prompt, prompt),
            (self.output, output),
            (self.max_new, max_new),
        ):
            column.frombytes(np.ascontiguousarray(values).tobytes())

    def trace(self) -> Trace:
        """Sort (or refuse) and hand out the trace."""
        if not len(self):
            raise self.source.error("there is no request in it")
        arrival = np.array(self.arrival, dtype=np.int64)
        late = np.flatnonzero(arrival < np.maximum.accumulate(arrival))
        order = np.argsort(arrival, kind="stable")
        if late.size and self.ordered:
            raise self.source.error(
                "arrives before the line above it: sort the rows by arrival", self.line[late[0]]
            )
        if late.size:
            self.notices.append(f"{late.size:,} rows sorted by time")
        arrival = arrival[order]
        prefix = self.prefix
        if prefix is not None:
            prefix = [prefix[i] for i in order.tolist()] if late.size else prefix
        return Trace(
            self.source.name,
            self.unit,
            (arrival - arrival[0]) / TICKS if self.unit == "s" else arrival,
            np.array(self.prompt)[order],
            np.array(self.output)[order],
            np.array(self.max_new)[order],
            None if prefix is None else tuple(prefix),
            tuple(self.notices),
            failed=self.failed,
            skipped=self.skipped,
        )
