"""Does the time of the books grow linearly with the requests?

Alpaca-like requests, all waiting at the start, on 131,072 slots with at most 256 running, the
scheduler's loop included; as many as a million. Seconds are of the processor, which a shared
machine does not stretch; the books run on one core.

Refuted if a request cost half as much again among the most requests as among the fewest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import process_time

from ..generators import generate
from ..registry import Report
from ..row_tables import Column, Columns, Row
from ..saturated import drain
from ..specs import parse_spec, token_geometry

SIMULATED = False
COLUMNS: Columns = (
    Column("backend", "backend"),
    Column("requests", "requests"),
    Column("tokens", "tokens"),
    Column("CPU seconds", "seconds"),
    Column("µs per request", "us_per_request"),
    Column("µs per token", "us_per_token"),
)


@dataclass(frozen=True)
class Config:
    """Backends (pages count tokens), numbers of requests, slots and the bound on running ones."""

    backends: tuple[str, ...] = ("paged:16", "vmm:16", "contiguous:max")
    requests: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    slots: int = 131_072
    running: int = 256
    seed: int = 0


CONFIG = Config()
QUICK = Config(requests=(100, 1_000))


def run(config: Config, report: Report) -> list[Row]:
    """One row per backend and number of requests."""
    rows: list[Row] = []
    total = len(config.backends) * sum(config.requests)
    geometry, memory = token_geometry(config.slots)
    done = 0
    for num in config.requests:
        trace = generate("alpaca", requests=num, seed=config.seed, rate=0).with_max_new(None)
        for name in config.backends:
            allocator = parse_spec(name, slots=True).allocator(geometry, memory)
            start, tokens = process_time(), 0
            for step, scheduler in enumerate(drain(trace, allocator, max_running=config.running)):
                tokens = scheduler.counts.tokens
                if step % 256 == 0:
                    report.progress(done + num - len(scheduler.waiting), total)
            took = process_time() - start
            done += num
            rows.append(
                {
                    "backend": name,
                    "requests": num,
                    "tokens": tokens,
                    "seconds": took,
                    "us_per_request": took / num * 1e6,
                    "us_per_token": took / tokens * 1e6,
                }
            )
    return rows


def plot(rows: list[Row], out: Path) -> list[Path]:
    """Seconds over requests, and a line of slope one."""
    from matplotlib.figure import Figure

    from .. import style

    with style.applied():
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.subplots()
        for name in dict.fromkeys(row["backend"] for row in rows):
            mine = [(row["requests"], row["seconds"]) for row in rows if row["backend"] == name]
            look = style.backend_style(name)
            axes.plot(*zip(*mine, strict=True), color=look.color, ls=look.line, marker=look.marker,
                      label=name)  # fmt: skip
        few, many = rows[0], rows[-1]
        ends = [few["requests"], many["requests"]]
        slope = few["seconds"] / few["requests"]
        axes.plot(ends, [slope * x for x in ends], color=style.FAINT, lw=0.8, label="linear")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("requests")
        axes.set_ylabel("CPU seconds")
        axes.legend()
        style.heading(figure, "Time of the books, the scheduler's loop included")
        return style.save(figure, out, "scaling")
