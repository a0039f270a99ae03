"""How much of the memory holds tokens, policy by policy, while more requests wait than fit?

The figure of the PagedAttention paper (Kwon et al. 2023), by accounting alone: OPT-13B, 12 GiB,
ShareGPT-like lengths, Orca's three reservations with buddy placement against pages and mapping.
The lengths are drawn anew, not those of the paper; Orca's "max" is the model's context limit.

Refuted if the shares do not rise from limit over pow2 and oracle to paged, or if pages of 16
tokens hold tokens in less than 95 % of the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...models import geometry
from ..generators import generate
from ..output import parse_bytes
from ..registry import Report
from ..row_tables import Column, Columns, Row, percent
from ..saturated import serve
from ..specs import parse_spec

SIMULATED = False
PAPER = {
    "contiguous:limit:buddy": 0.204,
    "contiguous:pow2:buddy": 0.268,
    "contiguous:oracle:buddy": 0.382,
    "paged:16": 0.963,
}
COLUMNS: Columns = (
    Column("backend", "backend"),
    Column("holds tokens", "tokens", percent),
    Column("filled later", "later", percent),
    Column("never filled", "never", percent),
    Column("free", "free", percent),
    Column("tokens / held", "of_held", percent),
    Column("paper", "paper", percent),
    Column("running", "running"),
    Column("preemptions", "preemptions"),
    Column("steps", "steps"),
)


@dataclass(frozen=True)
class Config:
    """Model, memory and requests; backends by SPEC."""

    model: str = "opt-13b"
    memory: str = "12GiB"
    requests: int = 2_000
    seed: int = 0
    backends: tuple[str, ...] = (*PAPER, "vmm:64KiB", "vmm:2MiB", "vmm:2MiB:interleaved")


CONFIG = Config()
QUICK = Config(requests=250)


def run(config: Config, report: Report) -> list[Row]:
    """Shares of the memory, averaged over the steps in which a request waits; steps in all."""
    trace = generate("sharegpt", requests=config.requests, seed=config.seed, rate=0)
    trace = trace.with_max_new("output")
    model, memory = geometry(config.model), parse_bytes(config.memory)
    rows: list[Row] = []
    for done, name in enumerate(config.backends):
        report.progress(done, len(config.backends))
        allocator = parse_spec(name, slots=False).allocator(model, memory)
        served = serve(trace, allocator)
        mean = served.shares
        rows.append(
            {
                "backend": name,
                **mean,
                "of_held": mean["tokens"] / (1 - mean["free"]),
                "paper": PAPER.get(name),
                "steps": served.num_steps,
                "preemptions": served.counts.preemptions,
            }
        )
    return rows


PARTS = (
    ("tokens", "holds tokens", 0.0),
    ("later", "held, filled later", 0.55),
    ("never", "held, never filled", 0.78),
    ("free", "free, too small or in the wrong place", 0.93),
)


def plot(rows: list[Row], out: Path) -> list[Path]:
    """Stacked bars, and the paper's shares as ticks."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    from .. import style

    with style.applied():
        figure = Figure(figsize=(7.2, 0.42 * len(rows) + 1.7), layout="constrained")
        axes = figure.subplots()
        for y, row in enumerate(rows):
            color, left = style.backend_style(row["backend"]).color, 0.0
            for key, _, amount in PARTS:
                axes.barh(y, 100 * row[key], 0.66, left, color=style.tint(color, amount))
                left += 100 * row[key]
            if row["paper"] is not None:
                axes.plot([100 * row["paper"]] * 2, [y - 0.42, y + 0.42], color=style.INK)
        axes.set_yticks(range(len(rows)), [row["backend"] for row in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of the memory, mean over the steps with a waiting request")
        handles: list[Patch | Line2D] = [
            Patch(color=style.tint("#555555", amount), label=label) for _, label, amount in PARTS
        ]
        handles.append(Line2D([], [], color=style.INK, label="PagedAttention paper"))
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        style.heading(figure, "Share of KV memory that holds tokens")
        return style.save(figure, out, "policies")
