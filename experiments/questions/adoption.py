"""Which idle row should a new sequence of the mapped backend take over?

Pages of a finished sequence stay mapped in its row. Whoever takes the row over needs driver
calls only for what is missing, so the choice of the row decides how many calls are made. The
same trace is served several times over, uniform and mixed lengths, with ample and with tight
memory; counted are the driver calls that the books ask for (map and unmap of a page, one access
grant per run of pages), from the second pass on.

Refuted if, with ample memory and uniform lengths, a further pass made any driver call, or if
on mixed lengths another policy made fewer calls than the default, the lowest idle row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...geometry import SLOTS, KVGeometry
from ...vmm.allocator import ADOPTION, VmmAllocator
from ..generators import generate
from ..registry import Report
from ..row_tables import Column, Columns, Row
from ..saturated import drain
from ..trace import Trace

SIMULATED = False
COLUMNS: Columns = (
    Column("lengths", "lengths"),
    Column("memory", "memory"),
    Column("adoption", "adoption"),
    Column("calls a request, first pass", "first_calls"),
    Column("calls a request, later passes", "later_calls"),
    Column("calls a grown page", "calls_per_page"),
)


@dataclass(frozen=True)
class Config:
    """Requests per pass, passes, the bound on running requests, tokens per page, policies."""

    requests: int = 400
    passes: int = 4
    running: int = 32
    page: int = 64
    policies: tuple[str, ...] = ADOPTION
    seed: int = 0


CONFIG = Config()
QUICK = Config(requests=80, passes=3, running=16)


class CountingAllocator(VmmAllocator):
    """The books, and the driver calls that a cache would make for them."""

    attaches = True

    def __init__(self, geometry: KVGeometry, memory_bytes: int, page: int, adoption: str) -> None:
        super().__init__(geometry, memory_bytes, page, adoption=adoption)
        self.num_calls = 0
        self.num_grown = 0

    def _attach(self, row: int, g: int, begin: int, end: int) -> None:
        self.num_calls += end - begin + 1  # map each page, allow the run
        self.num_grown += end - begin

    def _detach(self, row: int, g: int, begin: int, end: int) -> None:
        self.num_calls += 1  # unmap the run


def run(config: Config, report: Report) -> list[Row]:
    """One row per lengths, memory and policy."""
    cases = [
        (lengths, memory, adoption)
        for lengths in ("uniform", "mixed")
        for memory in ("ample", "tight")
        for adoption in config.policies
    ]
    rows = []
    for n, (lengths, memory, adoption) in enumerate(cases):
        report.progress(n, len(cases))
        trace = _trace(lengths, config)
        most = int((trace.prompt + trace.output).max())
        row_pages = -(-most // config.page)
        # Ample: every row can be full at once. Tight: two fifths of that.
        num_pages = config.running * row_pages * (5 if memory == "ample" else 2) // 5
        allocator = CountingAllocator(SLOTS, num_pages * config.page, config.page, adoption)
        calls = [_serve(trace, allocator, config.running) for _ in range(config.passes)]
        later = sum(calls[1:]) / (len(trace) * (config.passes - 1))
        rows.append(
            {
                "lengths": lengths,
                "memory": memory,
                "adoption": adoption,
                "first_calls": calls[0] / len(trace),
                "later_calls": later,
                "calls_per_page": allocator.num_calls / max(allocator.num_grown, 1),
            }
        )
    return rows


def _trace(lengths: str, config: Config) -> Trace:
    """Uniform: all requests alike. Mixed: lognormal lengths, as chats have them."""
    if lengths == "mixed":
        return generate(
            "sharegpt", requests=config.requests, seed=config.seed, rate=0
        ).with_max_new()
    trace = generate(
        "uniform",
        requests=config.requests,
        seed=config.seed,
        rate=0,
        prompt=(500, 500),
        output=(200, 200),
    )
    return trace.with_max_new()


def _serve(trace: Trace, allocator: CountingAllocator, running: int) -> int:
    """Serve everything once; returns the driver calls that it took."""
    before = allocator.num_calls
    for _ in drain(trace, allocator, max_running=running):
        pass
    return allocator.num_calls - before


def plot(rows: list[Row], out: Path) -> list[Path]:
    """Driver calls per request of a later pass, by setting and policy."""
    from matplotlib.figure import Figure

    from .. import style

    settings = list(dict.fromkeys((row["lengths"], row["memory"]) for row in rows))
    policies = list(dict.fromkeys(row["adoption"] for row in rows))
    with style.applied():
        figure = Figure(figsize=(7.6, 3.2), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / len(policies)
        for p, policy in enumerate(policies):
            values = [row["later_calls"] for row in rows if row["adoption"] == policy]
            at = np.arange(len(settings)) + (p - (len(policies) - 1) / 2) * width
            bars = axes.bar(at, values, width * 0.92, color=str(0.25 + 0.25 * p), label=policy)
            axes.bar_label(bars, fmt="%.1f", padding=2)
        axes.set_xticks(range(len(settings)), [f"{a} lengths\n{b} memory" for a, b in settings])
        axes.set_ylabel("driver calls per request")
        axes.legend(title="adopts", frameon=False)
        style.heading(figure, "Driver calls of a repeated trace, by the row that is taken over")
        return style.save(figure, out, "adoption")
