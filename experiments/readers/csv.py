"""CSV traces: our own, Azure, Vidur, BurstGPT and plain length sets, told apart by header."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np

from ..trace import MAX_STEP, MISSING, Ints, Trace
from .cells import BadCell, runs, seconds, stamps, whole, whole_or_missing
from .columns import Columns
from .source import Source

MAX_COLUMNS = 1000
MAX_QUOTED = 1 << 20
_ROWS = 1 << 16


@dataclass(frozen=True)
class CsvFormat:
    """What the columns of one family are called (lower case)."""

    title: str
    time: str | None
    prompt: str
    output: str
    clock: Literal["s", "step", "stamp", "none"]
    ours: bool = False
    optional: tuple[str, ...] = field(default=())
    failures: bool = False
    """Output 0 means a failed request; rows of 0 and 0 tokens say nothing."""

    @property
    def required(self) -> tuple[str, ...]:
        """Columns without which a file is not of this family."""
        return (*((self.time,) if self.time else ()), self.prompt, self.output)


_OURS = ("max_new_tokens", "prefix", "prefix_tokens")
FORMATS = (
    CsvFormat("our own CSV", "arrival_step", "prompt_tokens", "output_tokens", "step", True, _OURS),
    CsvFormat("our own CSV", "arrival_s", "prompt_tokens", "output_tokens", "s", True, _OURS),
    CsvFormat("Azure CSV", "timestamp", "contexttokens", "generatedtokens", "stamp"),
    CsvFormat("Vidur CSV", "arrived_at", "num_prefill_tokens", "num_decode_tokens", "s"),
    CsvFormat("BurstGPT CSV", "timestamp", "request tokens", "response tokens", "s", failures=True),
    CsvFormat("length set", None, "num_prefill_tokens", "num_decode_tokens", "none"),
)


def recognise(source: Source, header: str) -> tuple[CsvFormat, list[str]] | None:
    """Find the family of a header line; None if it looks like no CSV trace at all.

    Raises
    ------
    BadInput
        Nearly a trace: columns are missing, doubled, or far too many.
    """
    if header.count(",") >= MAX_COLUMNS:
        raise source.error(f"more than {MAX_COLUMNS:,} columns: this is no trace", 1)
    try:
        names = [name.strip().lower() for name in _fields(header, MAX_COLUMNS)]
    except csv.Error:
        _require_commas(source, header)
        return None
    fitting = [f for f in FORMATS if set(f.required) <= set(names)]
    if len(fitting) > 1 and all(f.ours for f in fitting):
        raise source.error("give either arrival_s or arrival_step, not both", 1)
    if fitting:
        needed = {*fitting[0].required, *fitting[0].optional}
        doubled = sorted(name for name in needed if names.count(name) > 1)
        if doubled:
            raise source.error(f"column {doubled[0]} appears twice", 1)
        return fitting[0], names
    nearest = max(FORMATS, key=lambda f: len(set(f.required) & set(names)))
    missing = [name for name in nearest.required if name not in names]
    if len(missing) == len(nearest.required):
        _require_commas(source, header)
        return None
    if nearest.ours and nearest.time in missing:
        missing[missing.index(nearest.time)] = "arrival_s (or arrival_step)"
    raise source.error(f"as {nearest.title} it lacks the column {', '.join(missing)}", 1)


def _require_commas(source: Source, header: str) -> None:
    """Tell what a spreadsheet did to the file, where the columns are ours but for commas."""
    for mark, called in ((";", "semicolons"), ("\t", "tabs")):
        names = {name.strip(' "').lower() for name in header.split(mark)}
        if any(set(fmt.required) <= names for fmt in FORMATS):
            raise source.error(f"{called} stand between the columns: save it with commas", 1)


def read_csv(source: Source, lines: Iterator[str], found: tuple[CsvFormat, list[str]]) -> Trace:
    """Read the lines after the header; see `readers.read_trace`."""
    return _CsvReader(source, *found).read(lines)


def _fields(line: str, width: int) -> list[str]:
    """Split one line into at most ``width`` + 1 fields, however many it has.

    A record never spans lines, so an open quote cannot eat the file.
    """
    if '"' not in line:
        return line.split(",", width)
    if len(line) > MAX_QUOTED:
        raise csv.Error(f"quotes in a line of more than {MAX_QUOTED:,} characters")
    return next(csv.reader([line], strict=True), [])


class _CsvReader:
    def __init__(self, source: Source, fmt: CsvFormat, names: list[str]) -> None:
        self.source, self.format, self.width = source, fmt, len(names)
        self.at = {
            name: names.index(name) for name in (*fmt.required, *fmt.optional) if name in names
        }
        self.columns = Columns(source, "step" if fmt.clock == "step" else "s", ordered=fmt.ours)
        if ("prefix" in self.at) != ("prefix_tokens" in self.at):
            raise source.error("columns prefix and prefix_tokens come together", 1)
        if "prefix" in self.at:
            self.columns.prefix = []
        unknown = [name for name in names if name not in self.at]
        if fmt.ours and unknown:
            self.columns.notices.append(f"column {', '.join(unknown)[:80]} ignored")

    def read(self, lines: Iterator[str]) -> Trace:
        """The whole trace, from the lines after the header."""
        numbered = enumerate(lines, 2)
        while block := list(islice(numbered, _ROWS)):
            self._read_block(block)
        columns = self.columns
        if columns.skipped:
            columns.notices.append(f"{columns.skipped:,} rows of 0 + 0 tokens skipped")
        if columns.failed:
            columns.notices.append(f"{columns.failed:,} failed requests kept with 0 output tokens")
        return columns.trace()

    def _read_block(self, block: list[tuple[int, str]]) -> None:
        numbers, rows = [], []
        for number, line in block:
            if not line or line.isspace():
                continue
            try:
                fields = _fields(line, self.width)
            except csv.Error as problem:
                raise self.source.error(f"bad quoting ({problem})", number) from None
            if len(fields) != self.width:
                raise self.source.error(
                    f"{len(fields)} fields where the header names {self.width}; "
                    "the line may be cut off",
                    number,
                )
            numbers.append(number)
            rows.append(fields)
        if rows:
            self._read_columns(numbers, list(zip(*rows, strict=True)))

    def _read_columns(self, numbers: list[int], cells: list[tuple[str, ...]]) -> None:
        fmt, columns = self.format, self.columns

        def parse(name: str, read: Callable[[tuple[str, ...]], Ints]) -> Ints:
            return self._parse(numbers, cells[self.at[name]], read)

        low = 0 if fmt.failures else 1
        prompt = parse(fmt.prompt, lambda c: whole(c, fmt.prompt, low))
        output = parse(fmt.output, lambda c: whole(c, fmt.output, 0))
        arrival = np.zeros(len(numbers), np.int64)
        if fmt.time:
            arrival = parse(fmt.time, self._clock(fmt.time))
        max_new = np.full(len(numbers), MISSING, np.int64)
        if "max_new_tokens" in self.at:
            max_new = parse("max_new_tokens", whole_or_missing)
        if columns.prefix is not None:
            pairs = zip(cells[self.at["prefix"]], cells[self.at["prefix_tokens"]], strict=True)
            for number, (keys, sizes), tokens in zip(numbers, pairs, prompt.tolist(), strict=True):
                try:
                    columns.prefix.append(runs(keys, sizes, tokens))
                except BadCell as problem:
                    raise self.source.error(str(problem), number) from None
        if fmt.failures:
            kept = (prompt > 0) | (output > 0)
            if (prompt[kept] < 1).any():
                worst = numbers[int(np.flatnonzero(kept & (prompt < 1))[0])]
                raise self.source.error(f"{fmt.prompt} must be at least 1, not 0", worst)
            columns.skipped += int((~kept).sum())
            columns.failed += int((output[kept] == 0).sum())
            numbers = [n for n, keep in zip(numbers, kept.tolist(), strict=True) if keep]
            arrival, prompt, output, max_new = (
                column[kept] for column in (arrival, prompt, output, max_new)
            )
        columns.extend(numbers, arrival, prompt, output, max_new)

    def _clock(self, name: str) -> Callable[[tuple[str, ...]], Ints]:
        if self.format.clock == "stamp":
            return lambda cells: stamps(cells, name)
        if self.format.clock == "step":
            return lambda cells: whole(cells, name, 0, MAX_STEP)
        return lambda cells: seconds(cells, name)

    def _parse(
        self, numbers: list[int], cells: tuple[str, ...], read: Callable[[tuple[str, ...]], Ints]
    ) -> Ints:
        """Read a column at once; if something is wrong, cell by cell to name the line."""
        try:
            return read(cells)
        except BadCell:
            for number, cell in zip(numbers, cells, strict=True):
                try:
                    read((cell,))
                except BadCell as problem:
                    raise self.source.error(str(problem), number) from None
            raise
