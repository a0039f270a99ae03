"""The picture of an address space: each request a colour, free slots white, holes in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from . import style
from .refusal_marks import mark_refusals

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EMPTY_TINT = 0.62
PANEL_POINTS = 190.0  # about the width and the height of a panel
SMALLEST_LABEL = 9.0  # points
MOST_SHAPES = 4_000  # beyond, the slots of a panel become one picture inside the SVG


class Run(NamedTuple):
    """Neighbouring slots ``[low, high)`` that a request holds; the first of them store tokens."""

    low: float
    high: float
    request: int
    stored: float


class Block(NamedTuple):
    """A rectangle: steps ``[left, right)``, slots ``[low, high)``."""

    left: int
    right: int
    low: float
    high: float
    request: int
    stored: bool = True


def read_rows(owners: dict[str, Any]) -> Iterator[tuple[int, list[Run]]]:
    """Each recorded step and its runs by address; see ``compare_figures.draw`` for the format."""
    for step, row in zip(owners["steps"], owners["rows"], strict=True):
        yield (
            step,
            sorted(
                Run(low, high, request, stored[0] if stored else high - low)
                for low, high, request, *stored in row
            ),
        )


def merge(cells: Iterable[Block]) -> list[Block]:
    """Join blocks one step wide, given in order of steps, to few: along time, then upwards."""
    growing: dict[tuple[float, float, int, bool], Block] = {}
    wide: list[Block] = []
    for cell in cells:
        key = cell[2:]
        before = growing.get(key)
        if before is not None and before.right == cell.left:
            cell = before._replace(right=cell.right)
        elif before is not None:
            wide.append(before)
        growing[key] = cell
    wide += growing.values()
    tall: list[Block] = []
    for block in sorted(wide, key=lambda b: (b.left, b.right, b.request, b.stored, b.low)):
        below = tall[-1] if tall else None
        if below is not None and block == below._replace(low=below.high, high=block.high):
            tall[-1] = below._replace(high=block.high)
        else:
            tall.append(block)
    return tall


def cells(rows: Iterable[tuple[int, list[Run]]]) -> Iterator[Block]:
    """Stored and empty parts of each run at each step."""
    for step, runs in rows:
        for low, high, request, stored in runs:
            if stored > 0:
                yield Block(step, step + 1, low, low + stored, request)
            if low + stored < high:
                yield Block(step, step + 1, low + stored, high, request, stored=False)


def lives(rows: Iterable[tuple[int, list[Run]]]) -> list[Block]:
    """Where to write numbers: per stretch of steps in which a request holds slots from one start
    on, the slots that it held half-way."""
    stretches: dict[tuple[float, int], list[tuple[int, float]]] = {}
    done: list[Block] = []

    def close(low: float, request: int, seen: list[tuple[int, float]]) -> None:
        done.append(Block(seen[0][0], seen[-1][0] + 1, low, seen[len(seen) // 2][1], request))

    for step, runs in rows:
        for low, high, request, _ in runs:
            seen = stretches.setdefault((low, request), [])
            if seen and seen[-1][0] + 1 != step:
                close(low, request, seen)
                seen.clear()
            seen.append((step, high))
    for (low, request), seen in stretches.items():
        close(low, request, seen)
    return merge(sorted(done))


def borders(rows: list[tuple[int, list[Run]]]) -> list[list[tuple[float, float]]]:
    """Lines where one request borders on another, in space or from one step to the next."""
    lines: list[list[tuple[float, float]]] = []
    level: dict[float, int] = {}  # where a line is open, and since which step
    last: tuple[int, list[Run]] = (-2, [])
    for step, runs in [*rows, (-1, [])]:
        touching = {
            upper.low
            for lower, upper in pairwise(runs)
            if lower.high == upper.low and lower.request != upper.request
        }
        adjoins = step == last[0] + 1
        for at in [at for at in level if not adjoins or at not in touching]:
            lines.append([(level.pop(at), at), (last[0] + 1, at)])
        for at in touching:
            level.setdefault(at, step)
        if adjoins:
            lines += [[(step, low), (step, high)] for low, high in _taken_over(last[1], runs)]
        last = step, runs
    return lines


def _taken_over(before: list[Run], after: list[Run]) -> Iterator[tuple[float, float]]:
    """Slots that belong to one request and then to another."""
    old, new = iter(before), iter(after)
    one, other = next(old, None), next(new, None)
    while one is not None and other is not None:
        low, high = max(one.low, other.low), min(one.high, other.high)
        if low < high and one.request != other.request:
            yield low, high
        if one.high <= other.high:
            one = next(old, None)
        else:
            other = next(new, None)


def draw_address_space(compare: dict[str, Any], backends: list[dict[str, Any]]) -> Figure:
    """Slots over steps, one panel per backend that recorded its owners."""
    figure, panels = style.panels(len(backends), height=3.2)
    steps = [step for backend in backends for step in backend["owners"]["steps"]] or [0]
    most = max(backend["owners"]["slots"] for backend in backends)
    for backend, axes in zip(backends, panels, strict=True):
        axes.set_xlim(min(steps), max(steps) + 1)
        axes.set_ylim(0, most)
        rows = list(read_rows(backend["owners"]))
        _draw_runs(axes, rows)
        mark_refusals(axes, backend["owners"].get("refusals") or [], rows, PANEL_POINTS)
        style.title(axes, backend["spec"], style.outcome(backend))
        axes.spines[["right", "top"]].set_visible(True)
    style.name_axes(panels, "step", "token slot")
    owners = [backend["owners"] for backend in backends]
    _legend(
        figure,
        stored=any(len(run) > 3 for one in owners for row in one["rows"] for run in row),
        refusals=any(one.get("refusals") for one in owners),
    )
    style.heading(figure, f"Who holds which slot{style.of_trace(compare)}")
    return figure


def _draw_runs(axes: Axes, rows: list[tuple[int, list[Run]]]) -> None:
    from matplotlib.collections import LineCollection, PolyCollection

    (first, last), (_, slots) = axes.get_xlim(), axes.get_ylim()
    thinnest = min((r.high - r.low for _, runs in rows for r in runs), default=0)
    thinnest *= PANEL_POINTS / slots
    parts = merge(cells(rows))
    crowded = len(parts) > MOST_SHAPES
    colors = [
        style.tint(style.request_color(part.request), 0.0 if part.stored else EMPTY_TINT)
        for part in parts
    ]
    corners = [
        [(b.left, b.low), (b.right, b.low), (b.right, b.high), (b.left, b.high)] for b in parts
    ]
    # Without antialiasing there are no hairlines between neighbours, but thin ones would vanish;
    # browsers antialias all the same, and there a seam in the own colour closes them.
    seam = 0.0 if crowded else min(0.4, thinnest / 8)
    axes.add_collection(
        PolyCollection(
            corners, facecolors=colors, edgecolors=colors, linewidths=seam,
            antialiaseds=thinnest < 1, rasterized=crowded,
        )
    )  # fmt: skip
    width = min(0.4 if crowded else 1.0, thinnest / 4)  # never hides what it separates
    axes.add_collection(
        LineCollection(borders(rows), colors="white", linewidths=width, rasterized=crowded)
    )
    for block in lives(rows):
        wide = (block.right - block.left) / (last - first) * PANEL_POINTS
        tall = (block.high - block.low) / slots * PANEL_POINTS
        if min(wide, tall) >= SMALLEST_LABEL:
            _number(axes, block)


def _number(axes: Axes, block: Block) -> None:
    from matplotlib.patheffects import withStroke

    middle = (block.left + block.right) / 2, (block.low + block.high) / 2
    halo = withStroke(linewidth=2, foreground=style.request_color(block.request))
    axes.text(
        *middle, str(block.request + 1), ha="center", va="center_baseline", fontsize=8,
        fontweight="bold", color="white", path_effects=[halo],
    )  # fmt: skip


def _legend(figure: Figure, *, stored: bool, refusals: bool) -> None:
    """``stored``: it was recorded how many of the slots store a token."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    gray = "#777777"
    what = "stores a token" if stored else "held"
    handles: list[Any] = [Patch(facecolor=gray, label=f"{what} (number: request)")]
    if stored:
        empty = style.tint(gray, EMPTY_TINT)
        handles.append(Patch(facecolor=empty, label="reserved, no token in it"))
    handles.append(Patch(facecolor="white", edgecolor=style.FAINT, linewidth=0.6, label="free"))
    if refusals:
        cross = Line2D([], [], color=style.REFUSED, marker="x", ls="", mew=1.6, label="refused")
        handles.append(cross)
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
