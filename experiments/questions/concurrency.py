"""How many requests run at once in the same memory?

First the usual example: 32 GiB, Llama-3-8B, a limit of 4,096 tokens, requests of 500 tokens
each: 64 static reservations against 512 sequences of pages. Then recorded lengths (Azure's
conversations, all waiting at the start), where lengths differ and sequences grow: the mean
number of running requests while others wait. The factor over static reservations is as large as
the limit makes it: here the smallest there can be, the longest of these requests, and the
model's own beside it.

Refuted if pages did not admit 512 where static reservations admit 64, or if on recorded lengths
less than half of that factor of 8 were left.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...contract import OutOfMemory
from ...models import geometry
from ..output import parse_bytes
from ..recorded_traces import at_once, recorded
from ..registry import Report
from ..row_tables import Column, Columns, Row, percent
from ..saturated import serve
from ..specs import parse_spec
from ..trace import Trace

SIMULATED = False
COLUMNS: Columns = (
    Column("requests", "requests"),
    Column("backend", "backend"),
    Column("limit, tokens", "limit"),
    Column("running", "running"),
    Column("× static", "factor"),
    Column("holds tokens", "tokens", percent),
    Column("preemptions", "preemptions"),
)


@dataclass(frozen=True)
class Config:
    """Backends beside static reservations; the example's memory, limit and request; a file."""

    backends: tuple[str, ...] = (
        "contiguous:max",
        "contiguous:pow2",
        "paged:16",
        "vmm:64KiB",
        "vmm:2MiB",
        "vmm:2MiB:interleaved",
    )
    memory: str = "32GiB"
    limit: int = 4_096
    tokens: int = 500
    file: str = "azure2023_conv.csv"
    requests: int = 3_000


CONFIG = Config()
QUICK = Config(backends=("paged:16", "vmm:64KiB"), requests=150, memory="16GiB")
STATIC = "contiguous:limit"


def run(config: Config, report: Report) -> list[Row]:
    """Equal requests, then recorded ones; the first row of each is static, and the measure."""
    trace = at_once(recorded(config.file, "mixed", config.requests, report))
    longest = int((trace.prompt + trace.output).max())
    model = geometry("llama-3.1-8b").max_context
    others = [(name, None) for name in config.backends]
    equal = [(STATIC, config.limit), *others]
    unequal = [(STATIC, longest), (STATIC, model), *others]
    rows: list[Row] = []
    for name, limit in equal:
        report.progress(len(rows), len(equal) + len(unequal))
        rows.append(_row(name, limit, equal_requests(name, config, limit)))
    for name, limit in unequal:
        report.progress(len(rows), len(equal) + len(unequal))
        rows.append(_row(name, limit, recorded_requests(name, config, limit, trace)))
    first = {row["requests"]: row["running"] for row in reversed(rows)}
    return [{**row, "factor": row["running"] / first[row["requests"]]} for row in rows]


def _row(name: str, limit: int | None, counted: Row) -> Row:
    return {**counted, "backend": name, "limit": limit}


def equal_requests(name: str, config: Config, limit: int | None) -> Row:
    """Requests of equal length, as many as are admitted; a static one reserves ``limit`` tokens."""
    spec = parse_spec(name, slots=False)
    memory = parse_bytes(config.memory)
    allocator = spec.allocator(geometry("llama-3-8b"), memory, limit=limit)
    admitted = 0
    try:
        while True:
            allocator.admit(admitted, config.tokens, max_new=0, expected_new=0)
            admitted += 1
    except OutOfMemory:
        usage = allocator.usage()
    return {
        "requests": f"{config.tokens} tokens each",
        "running": admitted,
        "tokens": usage.live / usage.capacity,
        "preemptions": None,
    }


def recorded_requests(name: str, config: Config, limit: int | None, trace: Trace) -> Row:
    """Requests of a recorded trace, all at once: how many run on average."""
    spec = parse_spec(name, slots=False)
    memory = parse_bytes(config.memory)
    # Static ones reserve the limit, `max` and `pow2` by the largest output, as in compare.
    trace = trace.with_max_new(None if limit is None else "limit", limit=limit)
    served = serve(trace, spec.allocator(geometry("llama-3.1-8b"), memory, limit=limit))
    return {
        "requests": trace.name,
        "running": served.shares["running"],
        "tokens": served.shares["tokens"],
        "preemptions": served.counts.preemptions,
    }


def _label(row: Row) -> str:
    name, limit = row["backend"], row["limit"]
    return f"{name}" if limit is None else f"{name} ({limit:,})"


def plot(rows: list[Row], out: Path) -> list[Path]:
    """Running requests by backend, one panel per set of requests."""
    from matplotlib.figure import Figure

    from .. import style

    sets = list(dict.fromkeys(row["requests"] for row in rows))
    with style.applied():
        figure = Figure(figsize=(9.2, 3.2), layout="constrained")
        panels = figure.subplots(1, len(sets), squeeze=False)[0]
        for axes, name in zip(panels, sets, strict=True):
            mine = [row for row in rows if row["requests"] == name]
            for y, row in enumerate(mine):
                axes.barh(y, row["running"], 0.66, color=style.backend_style(row["backend"]).color)
                axes.annotate(f" {row['running']:,.0f}", (row["running"], y), va="center")
            axes.set_yticks(range(len(mine)), [_label(row) for row in mine])
            axes.invert_yaxis()
            axes.margins(x=0.15)
            axes.set_xlabel("running requests")
            style.title(axes, name, "")
        style.heading(figure, "Requests that run at once in the same memory")
        return style.save(figure, out, "concurrency")
