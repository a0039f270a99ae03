"""The tables of a report: which columns a result has, and each cell with its exact number."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

from .. import style
from ..registry import NAMES, find
from ..row_tables import Column, Columns, Row, is_numeric, percent, plain, size
from .read import Document

OUTCOME: Columns = (
    Column("backend", "spec"),
    Column("room, tokens", "capacity_tokens"),
    Column("admitted", "admitted"),
    Column("rejected", "rejected"),
    Column("never fit", "never_fit"),
    Column("completed", "completed"),
    Column("growth failures", "growth_failures"),
    Column("refused, yet free", "fragmentation_failures"),
    Column("preemptions", "preemptions"),
    Column("tokens generated", "tokens"),
    Column("steps", "steps"),
)
MEMORY: Columns = (
    Column("backend", "spec"),
    Column("peak live, tokens", "peak_live"),
    Column("peak reserved, tokens", "peak_reserved"),
    Column("peak waste, tokens", "peak_waste"),
    Column("peak fragmentation", "peak_fragmentation", percent),
    Column("hits, tokens", "hit_tokens"),
    Column("recomputed, tokens", "recomputed_tokens"),
    Column("swapped, tokens", "swapped_tokens"),
    Column("tables", "table_bytes", size),
    Column("allocator calls", "allocations"),
)
TIMES: Columns = (
    Column("backend", "spec"),
    Column("allocate p50, µs", "allocate_us.p50"),
    Column("p99, µs", "allocate_us.p99"),
    Column("max, µs", "allocate_us.max"),
    Column("attend p50, ms", "attend_ms.p50"),
    Column("p99, ms", "attend_ms.p99"),
    Column("TPOT p50, ms", "tpot_ms.p50"),
    Column("p99, ms", "tpot_ms.p99"),
    Column("total, s", "seconds.total"),
    Column("max error", "max_abs_error"),
)
PARTS = (("Requests", OUTCOME), ("Memory", MEMORY), ("Time", TIMES))
BENCHES = ("allocators", "attention", "cache", "driver", "mapped")
MODULES = {"sweep": "sweep_command", **{f"bench_{name}": f"bench.{name}" for name in BENCHES}}
"""Modules with columns that are no experiments of the registry."""
UNITS = {"us": "µs", "gbps": "GB/s", "mib": "MiB", "num": "number of"}


class Cell(NamedTuple):
    """What is shown; the number or text behind it, as JSON has it; a backend's colour."""

    shown: str
    exact: Any
    color: str | None


class Table(NamedTuple):
    """Headers as (text, whether numbers stand below), cells row by row."""

    title: str
    headers: list[tuple[str, bool]]
    rows: list[list[Cell]]


def tables(document: Document) -> list[Table]:
    """One table, or the three of a comparison."""
    if not document.is_comparison:
        rows = document.content["rows"]
        return [table("", columns(document.name, rows), rows)]
    flat = [_flat(backend) for backend in document.content["backends"]]
    whole = [
        table(title, tuple(c for c in part if any(r.get(c.key) is not None for r in flat)), flat)
        for title, part in PARTS
    ]
    return [one for one in whole if len(one.headers) > 1]


def columns(name: str, rows: list[Row]) -> Columns:
    """The columns of an experiment; where it has none, all plain values under their keys."""
    if name in NAMES:
        return find(name).module.COLUMNS
    if name in MODULES:
        found: Columns = import_module(f"..{MODULES[name]}", __package__).COLUMNS
        return found
    keys = dict.fromkeys(key for row in rows for key in row)
    return tuple(
        Column(header(key), key, size if key.endswith("_bytes") else plain)
        for key in keys
        if not any(isinstance(row.get(key), list | dict) for row in rows)
    )


def header(key: str) -> str:
    """A key as people read it.

    >>> header("bare_us_p50"), header("page_bytes")
    ('bare µs p50', 'page')
    """
    return " ".join(UNITS.get(word, word) for word in key.removesuffix("_bytes").split("_"))


def table(title: str, columns: Columns, rows: Iterable[Row]) -> Table:
    """Fill a table; a cell that its column cannot write is shown as JSON has it."""
    rows = list(rows)
    return Table(
        title,
        [(column.header, is_numeric(column, rows)) for column in columns],
        [[_cell(column, row.get(column.key)) for column in columns] for row in rows],
    )


def _cell(column: Column, value: Any) -> Cell:
    color = style.backend_style(str(value)).color if column.key in ("backend", "spec") else None
    try:
        shown = column.write(value)
    except (TypeError, ValueError):
        shown = json.dumps(value, ensure_ascii=False)
    return Cell(shown, value, color)


def _flat(backend: Row) -> Row:
    """``{"tpot_ms": {"p50": 1}}`` as ``{"tpot_ms.p50": 1}``, besides the rest."""
    nested = {
        f"{key}.{part}": inner
        for key, value in backend.items()
        if isinstance(value, dict)
        for part, inner in value.items()
    }
    return backend | nested
