"""Rows of an experiment as a table: on a terminal, and in Markdown for the docs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .output import format_bytes

Row = dict[str, Any]
"""What an experiment or a bench found at one point: values by name, ready for JSON."""


def plain(value: Any) -> str:
    """Text as it is, counts with separators, other numbers to three digits, None as a dash.

    >>> plain(12345), plain(0.01234), plain(1234.5), plain(None), plain("paged:16")
    ('12,345', '0.0123', '1,234', '–', 'paged:16')
    """
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """A share of 1 with one decimal.

    >>> percent(0.9634)
    '96.3 %'
    """
    return "–" if value is None else f"{100 * value:.1f} %"


def size(value: float | None) -> str:
    """Bytes in their largest unit.

    >>> size(65536)
    '64 KiB'
    """
    return "–" if value is None else format_bytes(value)


class Column(NamedTuple):
    """One column: its header, the key of a row, and how a value is written."""

    header: str
    key: str
    write: Callable[[Any], str] = plain


Columns = tuple[Column, ...]


def show(columns: Columns, rows: Iterable[Row], title: str) -> None:
    """Print rows as a table; columns that the terminal has no room for go into a further one.

    Each begins with what names a row: the columns through the last one of text.
    """
    rows = list(rows)
    room = Console().width
    for part in _parts(columns, rows, room):
        table = _table(part, rows)
        table.title, title = title, ""
        # Where not even one column has room, lines are longer, and nothing is cut.
        Console(width=max(room, _total_width(part, rows))).print(table)


def _parts(columns: Columns, rows: list[Row], room: int) -> Iterator[Columns]:
    """The columns, so many at a time as fit beside the names; one column is always taken."""
    text = [
        n for n, c in enumerate(columns) if any(isinstance(row.get(c.key), str) for row in rows)
    ]
    num_names = 1 + max(text, default=0)
    names, part = columns[:num_names], columns[:num_names]
    for column in columns[num_names:]:
        wider = (*part, column)
        if part != names and _total_width(wider, rows) > room:
            yield part
            wider = (*names, column)
        part = wider
    yield part


def _total_width(columns: Columns, rows: list[Row]) -> int:
    return sum(_width(column, rows) + 1 for column in columns) - 1


def _width(column: Column, rows: list[Row]) -> int:
    """Headers wrap between words, values do not."""
    values = (column.write(row.get(column.key)) for row in rows)
    return max(len(word) for word in (*column.header.split(), *values))


def _table(columns: Columns, rows: list[Row]) -> Table:
    table = Table(title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=0)
    for column in columns:
        justify: Literal["left", "right"] = "right" if is_numeric(column, rows) else "left"
        table.add_column(column.header, justify=justify, width=_width(column, rows))
    for row in rows:
        # A value may be a file's name: text, whatever it looks like, and not markup.
        table.add_row(*(Text(column.write(row.get(column.key))) for column in columns))
    return table


def markdown_table(columns: Columns, rows: Iterable[Row]) -> str:
    """The rows as a Markdown table, without a trailing newline."""
    rows = list(rows)
    lines = [
        "| " + " | ".join(column.header for column in columns) + " |",
        "|" + "|".join("--:" if is_numeric(c, rows) else "---" for c in columns) + "|",
    ]
    for row in rows:
        lines.append("| " + " | ".join(c.write(row.get(c.key)) for c in columns) + " |")
    return "\n".join(lines)


def is_numeric(column: Column, rows: list[Row]) -> bool:
    """Whether numbers stand in the column, and no text."""
    values = [row.get(column.key) for row in rows]
    return any(isinstance(v, int | float) for v in values) and not any(
        isinstance(v, str) for v in values
    )
