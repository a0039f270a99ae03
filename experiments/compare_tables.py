"""The result of a comparison on a terminal: what became of the requests, the memory, the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .output import counted

Backend = dict[str, Any]
Value = int | float | str | None


class Measure(NamedTuple):
    """A column: its header, the value of a backend, and whether zeros alone are worth showing."""

    header: str
    value: Callable[[Backend], Value]
    always: bool = False


BOOKS = (
    Measure("admit/\nreject", lambda b: f"{b['admitted']:,}/{b['rejected']:,}", always=True),
    Measure("never\nfit", lambda b: b["never_fit"]),
    Measure("done", lambda b: b["completed"], always=True),
    Measure("growth\nfailed", lambda b: b["growth_failures"], always=True),
    Measure("refused,\nyet free", lambda b: b["fragmentation_failures"], always=True),
    Measure("pre-\nempted", lambda b: b["preemptions"]),
    Measure("peak\nreserved", lambda b: b["peak_reserved"], always=True),
    Measure(
        "peak waste\n(of room)",
        lambda b: _share(b["peak_waste"], b["capacity_tokens"]),
        always=True,
    ),
    Measure("frag-\nmented", lambda b: f"{b['peak_fragmentation']:.0%}"),
)
TIMES = (
    Measure("allocate µs\np50", lambda b: b["allocate_us"]["p50"]),
    Measure("\np99", lambda b: b["allocate_us"]["p99"]),
    Measure("attend ms\np50", lambda b: b["attend_ms"]["p50"]),
    Measure("\np99", lambda b: b["attend_ms"]["p99"]),
    Measure("TPOT ms\np50", lambda b: b["tpot_ms"]["p50"]),
    Measure("\np99", lambda b: b["tpot_ms"]["p99"]),
    Measure("total s", lambda b: b["seconds"]["total"]),
    Measure("max error", lambda b: _scientific(b["max_abs_error"])),
)
NOTHING = (None, 0, "0%")


def compare_table(compare: dict[str, Any]) -> Table:
    """The table that ``kvalloc compare`` ends with, from what compare.json holds.

    One row per backend; columns without any value (times of ``--account``), or with nothing but
    zeros where that goes without saying, are left out. The last line says what to look at.
    """
    backends = compare["backends"]
    trace = compare.get("trace") or {}
    requests = f", {counted(trace['requests'], 'request')}" if trace.get("requests") else ""
    whole = Table.grid()
    whole.add_column()
    if trace.get("name"):
        capacities = sorted({b["capacity_tokens"] for b in backends})
        memory = " or ".join(f"{tokens:,}" for tokens in capacities[:2])
        whole.add_row(Text(f"{trace['name']}{requests}, room for {memory} tokens", style="bold"))
    whole.add_row(_section(backends, BOOKS))
    if any(column.value(b) is not None for b in backends for column in TIMES):
        whole.add_row(_section(backends, TIMES))
    whole.add_row(Text(what_to_look_at(compare), style="italic"))
    return whole


def what_to_look_at(compare: dict[str, Any]) -> str:
    """One sentence: where the backends differ, and who stands out."""
    backends = compare["backends"]
    seen = []
    refused = max(backends, key=lambda b: b["fragmentation_failures"])
    if number := refused["fragmentation_failures"]:
        often = "once" if number == 1 else f"{number:,} times"
        seen.append(f"refused, yet free ({refused['spec']} {often})")
    most, least = (pick(backends, key=lambda b: b["peak_waste"]) for pick in (max, min))
    if most["peak_waste"] > least["peak_waste"]:
        worst, best = (f"{b['spec']} {b['peak_waste']:,}" for b in (most, least))
        seen.append(f"peak waste ({worst}, {best})")
    if seen:
        return f"Look at {' and '.join(seen)}."
    timed = [b for b in backends if b["tpot_ms"]["p50"] is not None]
    if len(timed) > 1:
        slow, fast = (pick(timed, key=lambda b: b["tpot_ms"]["p50"]) for pick in (max, min))
        return (
            f"The books agree; look at TPOT: {fast['tpot_ms']['p50']:.2f} ms with "
            f"{fast['spec']}, {slow['tpot_ms']['p50']:.2f} with {slow['spec']}."
        )
    if len(backends) == 1:
        return "Nothing was refused for fragmentation; name further backends to compare."
    return "The books agree: nothing was refused for fragmentation, and waste is the same."


def _section(backends: list[Backend], columns: tuple[Measure, ...]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("backend", style="bold", vertical="bottom", overflow="fold")
    shown = [
        column
        for column in columns
        if column.always or any(column.value(b) not in NOTHING for b in backends)
    ]
    for column in shown:
        table.add_column(column.header, justify="right", overflow="fold")
    for backend in backends:
        table.add_row(backend["spec"], *(_text(column.value(backend)) for column in shown))
    return table


def _text(value: Value) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return value if isinstance(value, str) else f"{value:,}"


def _share(tokens: float, capacity: float) -> str:
    return f"{_text(tokens)} ({tokens / capacity:.0%})"


def _scientific(value: float | None) -> str | None:
    return None if value is None else f"{value:.1e}"
