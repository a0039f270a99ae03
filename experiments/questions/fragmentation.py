"""How large is the largest free interval, and what does its smallness refuse, over time?

Contiguous reservations and exact growth, each with three placements, on one arrival stream;
pages beside them, for which every free page is as good as another. A refusal counts as
fragmented when enough memory was free and not where it was needed.

Refuted if no placement were refused with enough memory free, or if pages ever were.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...models import geometry
from ..generators import generate
from ..output import parse_bytes
from ..registry import Report
from ..replay import replay
from ..row_tables import Column, Columns, Row, percent
from ..specs import parse_spec

SIMULATED = False
MAX_POINTS = 250
COLUMNS: Columns = (
    Column("backend", "backend"),
    Column("steps", "steps"),
    Column("fragmentation, mean", "mean_fragmentation", percent),
    Column("peak", "peak_fragmentation", percent),
    Column("refused, yet free", "fragmentation_failures"),
    Column("growth refused", "growth_failures"),
    Column("preemptions", "preemptions"),
)


@dataclass(frozen=True)
class Config:
    """Model, memory and an arrival stream a little above what the memory serves."""

    model: str = "llama-3-8b"
    memory: str = "1GiB"
    requests: int = 1_500
    rate: float = 2.0
    seed: int = 0
    backends: tuple[str, ...] = (
        "contiguous:oracle:first-fit",
        "contiguous:oracle:best-fit",
        "contiguous:oracle:buddy",
        "contiguous:exact:first-fit",
        "contiguous:exact:best-fit",
        "contiguous:exact:buddy",
        "paged:16",
    )


CONFIG = Config()
QUICK = Config(requests=150)


def run(config: Config, report: Report) -> list[Row]:
    """One row per backend; ``series`` holds step and external fragmentation, thinned."""
    trace = generate("sharegpt", requests=config.requests, rate=config.rate, seed=config.seed)
    trace = trace.with_max_new("output")
    model, memory = geometry(config.model), parse_bytes(config.memory)
    rows: list[Row] = []
    for done, name in enumerate(config.backends):
        report.progress(done, len(config.backends))
        allocator = parse_spec(name, slots=False).allocator(model, memory)
        outcome = replay(trace, allocator)
        counts, series = outcome.counts, outcome.recorder.series
        free = np.array(series["free"])
        largest = np.array(series["largest_free"])
        fragmentation = 1 - np.divide(largest, free, out=np.ones(len(free)), where=free > 0)
        stride = -(-len(free) // MAX_POINTS)
        rows.append(
            {
                "backend": name,
                "steps": outcome.recorder.num_steps,
                "mean_fragmentation": float(fragmentation.mean()),
                "peak_fragmentation": outcome.recorder.peak_fragmentation,
                "fragmentation_failures": counts.fragmentation_failures,
                "growth_failures": counts.growth_failures,
                "preemptions": counts.preemptions,
                "completed": counts.completed,
                "series": {
                    "step": series["step"][::stride],
                    "fragmentation": fragmentation[::stride].round(4).tolist(),
                },
            }
        )
    return rows


def plot(rows: list[Row], out: Path) -> list[Path]:
    """External fragmentation over time, one panel per backend."""
    from .. import style

    with style.applied():
        figure, panels = style.panels(len(rows), height=1.7)
        for axes, row in zip(panels, rows, strict=True):
            color = style.backend_style(row["backend"]).color
            percents = [100 * value for value in row["series"]["fragmentation"]]
            axes.fill_between(row["series"]["step"], percents, color=style.tint(color, 0.5), lw=0)
            axes.plot(row["series"]["step"], percents, color=color, lw=0.7)
            axes.set_ylim(0, 100)
            axes.locator_params(axis="x", nbins=4)
            refused = row["fragmentation_failures"]
            style.title(axes, row["backend"], f"{refused:,} refused with enough free")
            if not any(percents):
                axes.annotate("0 at all times", (0.5, 0.06), xycoords="axes fraction", ha="center")
        style.name_axes(panels, "step", "% of free memory")
        style.heading(figure, "Free memory outside the largest free interval")
        return style.save(figure, out, "fragmentation")
