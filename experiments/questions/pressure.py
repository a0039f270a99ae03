"""When memory runs out: compute again, swap to the host, or turn requests away?

SIMULATED: requests, memory and preemptions are replayed exactly; the time of every step comes
from a roofline of the named GPU (``step_model``), not from a measurement. Goodput counts the
requests a second whose first token came within the limit and whose tokens followed, on average,
within theirs. Swapping moves the tokens of a victim to host memory and back over PCIe, and steps
wait for it. Nobody knows the outputs beforehand: ``contiguous:max`` reserves the largest one of
the trace for everybody, and ``contiguous:oracle`` stands for a server that knew them all.

Where requests are turned away, one whose growth is refused is cut off as well: it has an answer
in part, and its place is free for others.

Refuted if the three differed in goodput while nobody was preempted or turned away, or if
computing again served more good requests than swapping while sequences were preempted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..generators import generate
from ..output import parse_bytes
from ..registry import Report
from ..row_tables import Column, Columns, Row
from ..simulated_time import Timed, simulate
from ..specs import parse_spec
from ..step_model import step_model

SIMULATED = True
STRATEGIES: dict[str, dict[str, Any]] = {
    "recompute": {"on_full": "queue", "on_failure": "recompute"},
    "swap": {"on_full": "queue", "on_failure": "swap"},
    "reject": {"on_full": "reject", "on_failure": "drop"},
}
COLUMNS: Columns = (
    Column("backend", "backend"),
    Column("requests/s", "rate"),
    Column("strategy", "strategy"),
    Column("goodput/s", "goodput"),
    Column("first token p50, s", "ttft_p50_s"),
    Column("p99, s", "ttft_p99_s"),
    Column("per token p50, ms", "tpot_p50_ms"),
    Column("preempted", "preemptions"),
    Column("turned away", "turned_away"),
    Column("cut off", "cut_off"),
)


@dataclass(frozen=True)
class Config:
    """Model and GPU, memory for the cache, arrival rates, and what counts as good."""

    model: str = "llama-3-8b"
    gpu: str = "A100-80GB"
    tp: int = 1
    memory: str = "8GiB"
    requests: int = 1_500
    rates: tuple[float, ...] = (8.0, 12.0, 16.0, 18.0, 20.0, 24.0)
    backends: tuple[str, ...] = ("paged:16", "contiguous:max", "contiguous:oracle")
    ttft_limit_s: float = 2.0
    tpot_limit_ms: float = 50.0
    pcie_bytes_per_s: float = 25e9
    seed: int = 0


CONFIG = Config()
QUICK = Config(requests=120, rates=(8.0, 60.0), backends=("paged:16",), memory="2GiB")


def run(config: Config, report: Report) -> list[Row]:
    """One row per backend, rate and strategy; times are simulated."""
    model = step_model(config.model, config.gpu, config.tp)
    report.notice(
        f"simulated: step times from a roofline of {config.tp} × {config.gpu} with {config.model}"
    )
    rows: list[Row] = []
    total = len(config.backends) * len(config.rates) * len(STRATEGIES)
    for backend in config.backends:
        for rate in config.rates:
            trace = generate("sharegpt", requests=config.requests, rate=rate, seed=config.seed)
            trace = trace.with_max_new(None)
            for strategy, options in STRATEGIES.items():
                report.progress(len(rows), total)
                spec = parse_spec(backend, slots=False)
                allocator = spec.allocator(model.shard, parse_bytes(config.memory))
                timed = simulate(trace, allocator, model, config.pcie_bytes_per_s, **options)
                rows.append(
                    {
                        "backend": backend,
                        "rate": rate,
                        "strategy": strategy,
                        **_outcome(timed, config),
                    }
                )
    return rows


def _outcome(timed: Timed, config: Config) -> Row:
    done = np.isfinite(timed.finish)
    ttft = (timed.first - timed.arrival)[done]
    tpot = timed.tpot_s()[done]
    good = (ttft <= config.ttft_limit_s) & (tpot * 1e3 <= config.tpot_limit_ms)
    p50, p99 = np.percentile(ttft, [50, 99]) if done.any() else (None, None)
    return {
        "goodput": float(good.sum() / timed.end),
        "ttft_p50_s": p50,
        "ttft_p99_s": p99,
        "tpot_p50_ms": float(np.median(tpot) * 1e3) if done.any() else None,
        "preemptions": timed.counts.preemptions,
        "turned_away": timed.counts.rejected,
        "cut_off": int((~done).sum()) - timed.counts.rejected,
        "recomputed_tokens": timed.counts.recomputed_tokens,
        "swapped_tokens": timed.counts.swapped_tokens,
        "seconds": timed.end,
    }


def plot(rows: list[Row], out: Path) -> list[Path]:
    """Goodput and time to first token over the rate, one column of panels per backend."""
    from matplotlib.figure import Figure

    from .. import style

    backends = list(dict.fromkeys(row["backend"] for row in rows))
    lines = {"recompute": "solid", "swap": "dashed", "reject": "dotted"}
    with style.applied():
        figure = Figure(figsize=(3.0 * len(backends) + 1, 5.0), layout="constrained")
        grid = figure.subplots(2, len(backends), sharex=True, sharey="row", squeeze=False)
        for column, backend in enumerate(backends):
            for panel, key in ((0, "goodput"), (1, "ttft_p99_s")):
                axes = grid[panel][column]
                for strategy, line in lines.items():
                    mine = [
                        (row["rate"], row[key])
                        for row in rows
                        if row["backend"] == backend and row["strategy"] == strategy
                    ]
                    color = style.backend_style(backend).color
                    axes.plot(*zip(*mine, strict=True), "o", ls=line, color=color, label=strategy)
            style.title(grid[0][column], backend, "simulated")
            grid[1][column].set_xlabel("requests/s offered")
        for row_of_panels in grid:
            row_of_panels[0].set_ylim(0)  # shared, and so only once everything is drawn
        grid[0][0].set_ylabel("good requests/s")
        grid[1][0].set_ylabel("first token p99, s")
        handles = grid[0][0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=3)
        style.heading(figure, "Under memory pressure (simulated time)")
        return style.save(figure, out, "pressure-simulated")
