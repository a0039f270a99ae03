"""The picture of ``bench attention``: time and share of the memory's speed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import style
from ..row_tables import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "dense": style.INK,
    "paged": style.backend_style("paged:16").color,
    "gather": style.backend_style("paged:1").color,
    "torch": "#7b4a9e",
}
"""By the first word of a kernel's name."""
LINES = {"head-major": ("-", "o"), "token-major": (":", "s")}
SWEEPS = (("page_size", "context", "tokens in a block"), ("context", "page_size", "context"))
VALUES = (("ms", "ms"), ("of_read_bandwidth", "share of the read bandwidth"))


def plot(rows: list[Row], out: Path) -> list[Path]:
    """Draw time and share of the read bandwidth over block size and over context."""
    from matplotlib.figure import Figure

    with style.applied():
        figure = Figure(figsize=(9.6, 6.2), layout="constrained")
        grid = figure.subplots(2, 2, sharex="col", sharey="row")
        for column, (over, fixed, name) in enumerate(SWEEPS):
            mine = sweep(rows, over, fixed)
            for line, (value, label) in enumerate(VALUES):
                axes = grid[line, column]
                _draw(axes, mine, over, value)
                if column == 0:
                    axes.set_ylabel(label)
            grid[0, column].set_yscale("log")
            grid[1, column].set_ylim(0)
            grid[1, column].set_xlabel(f"{name} ({_fixed(mine, fixed)})")
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        first = rows[0]
        style.heading(
            figure,
            f"Decode attention, {first['batch'] * first['context']:,} tokens of {first['dtype']}, "
            f"{first['q_heads']}/{first['kv_heads']} heads × {first['head_dim']}",
        )
        return style.save(figure, out, "bench-attention")


def sweep(rows: list[Row], over: str, fixed: str) -> list[Row]:
    """The rows in which only ``over`` changes: those of the most frequent value of ``fixed``."""
    counts: dict[Any, set[Any]] = {}
    for row in rows:
        counts.setdefault(row[fixed], set()).add(row[over])
    kept = max(counts, key=lambda value: len(counts[value]))
    return [row for row in rows if row[fixed] == kept]


def _fixed(rows: list[Row], fixed: str) -> str:
    value = rows[0][fixed]
    return f"context {value:,}" if fixed == "context" else f"blocks of {value:,}"


def _draw(axes: Axes, rows: list[Row], over: str, value: str) -> None:
    for kernel, layout in dict.fromkeys((row["kernel"], row["layout"]) for row in rows):
        mine = [row for row in rows if (row["kernel"], row["layout"]) == (kernel, layout)]
        mine.sort(key=lambda row: row[over])
        line, marker = LINES[layout]
        axes.plot(
            [row[over] for row in mine],
            [row[value] for row in mine],
            line,
            marker=marker,
            markersize=4,
            color=COLORS[kernel.split("-")[0]],
            label=f"{kernel}, {layout}",
        )
    axes.set_xscale("log", base=2)
    ticks = sorted({row[over] for row in rows})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30)
    axes.minorticks_off()
