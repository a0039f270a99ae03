"""How many requests run at once in the same memory?

First the usual example: 32 GiB, Llama-3-8B, a limit of 4,096 tokens, requests of 500 tokens
each: 64 static reservations against 512 sequences of pages. Then recorded lengths (Azure's
conversations, all waiting at the start), where lengths differ and sequences grow: the mean
number of running requests while others wait.

Refuted if pages did not admit 512 where static reservations admit 64, or if the factor of 8
vanished on recorded lengths.
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

SIMULATED = False
COLUMNS: Columns = (
    Column("requests", "requests"),
    Column("backend", "backend"),
    Column("running", "running"),
    Column("× static", "factor"),
    Column("holds tokens", "tokens", percent),
    Column("preemptions", "preemptions"),
)


@dataclass(frozen=True)
class Config:
    """Backends; the example's memory, limit and request; recorded requests and their limit."""

    backends: tuple[str, ...] = (
        "contiguous:limit",
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
    recorded_limit: int = 16_384


CONFIG = Config()
QUICK = Config(backends=("contiguous:limit", "paged:16", "vmm:64KiB"), requests=150, memory="8GiB")


def run(config: Config, report: Report) -> list[Row]:
    """Two rows per backend: equal requests, and recorded ones."""
    total = 2 * len(config.backends)
    rows: list[Row] = []
    for counted in (equal_requests, recorded_requests):
        first: float | None = None
        for name in config.backends:
            report.progress(len(rows), total)
            row = counted(name, config, report)
            first = first or row["running"]
            rows.append({**row, "backend": name, "factor": row["running"] / first})
    return rows


def equal_requests(name: str, config: Config, report: Report) -> Row:
    """Requests of equal length, as many as are admitted; those that reserve reserve all."""
    model = geometry("llama-3-8b")
    spec = parse_spec(name, slots=False)
    allocator = spec.allocator(model, parse_bytes(config.memory), limit=config.limit)
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


def recorded_requests(name: str, config: Config, report: Report) -> Row:
    """Requests of a recorded trace, all at once: how many run on average."""
    trace = at_once(recorded(config.file, "mixed", config.requests, report)).with_max_new(None)
    spec = parse_spec(name, slots=False)
    memory, limit = parse_bytes(config.memory), config.recorded_limit
    allocator = spec.allocator(geometry("llama-3.1-8b"), memory, limit=limit)
    served = serve(trace, allocator)
    return {
        "requests": trace.name,
        "running": served.shares["running"],
        "tokens": served.shares["tokens"],
        "preemptions": served.counts.preemptions,
    }


def plot(rows: list[Row], out: Path) -> list[Path]:
    """Running requests by backend, one panel per set of requests."""
    from matplotlib.figure import Figure

    from .. import style

    sets = list(dict.fromkeys(row["requests"] for row in rows))
    with style.applied():
        figure = Figure(figsize=(9.2, 3.2), layout="constrained")
        panels = figure.subplots(1, len(sets), sharey=True, squeeze=False)[0]
        for axes, name in zip(panels, sets, strict=True):
            mine = [row for row in rows if row["requests"] == name]
            for y, row in enumerate(mine):
                axes.barh(y, row["running"], 0.66, color=style.backend_style(row["backend"]).color)
                axes.annotate(f" {row['running']:,.0f}", (row["running"], y), va="center")
            axes.set_yticks(range(len(mine)), [row["backend"] for row in mine])
            axes.margins(x=0.15)
            axes.set_xlabel("running requests")
            style.title(axes, name, "")
        panels[0].invert_yaxis()
        style.heading(figure, "Requests that run at once in the same memory")
        return style.save(figure, out, "concurrency")
