"""The refusals in the picture of an address space: crosses, and what the first one was told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .address_space import Run

MOST_CROSSES = 12
FONT_SIZE = 7.5  # points
LETTER_POINTS = 0.54 * FONT_SIZE  # mean width of a letter, a bit generous
LINE_POINTS = 1.2 * FONT_SIZE
MARGIN_POINTS = 4.0


def mark_refusals(
    axes: Axes, refusals: list[list[int]], rows: list[tuple[int, list[Run]]], points: float
) -> None:
    """Cross the steps of refusals at the upper edge and say why the first was refused.

    The sentence stands where no request holds a slot, if there is such a place beside its step:
    a picture of holes has one, most often the hole itself.

    Parameters
    ----------
    axes
        Of one backend, with its limits set.
    refusals
        Rows of ``[step, request]`` or ``[step, request, needed, free, largest_free]``, in tokens.
    rows
        Each recorded step and its runs by address.
    points
        About the width and the height of the axes.
    """
    if not refusals:
        return
    steps = sorted({refusal[0] for refusal in refusals})
    few = len(steps) <= MOST_CROSSES
    axes.plot(
        [step + 0.5 for step in steps], [1.0] * len(steps), "x" if few else "|",
        transform=axes.get_xaxis_transform(), clip_on=False, color=style.REFUSED,
        markersize=5, markeredgewidth=1.6 if few else 0.6,
    )  # fmt: skip
    lines = _sentence(refusals, steps)
    if not lines:
        return
    (first, last), (_, slots) = axes.get_xlim(), axes.get_ylim()
    wide = (max(map(len, lines)) * LETTER_POINTS + MARGIN_POINTS) / points * (last - first)
    tall = (len(lines) * LINE_POINTS + 2 * MARGIN_POINTS) / points * slots
    left = max(first, min(steps[0] + 0.5, last - wide))
    low, high = clear_band(rows, left, left + wide, tall, slots) or (slots - tall, slots)
    axes.annotate(
        "\n".join(lines), (left, (max(low, high - 2 * tall) + high) / 2), xytext=(MARGIN_POINTS, 0),
        textcoords="offset points", va="center", fontsize=FONT_SIZE, color=style.REFUSED,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
    )  # fmt: skip


def _sentence(refusals: list[list[int]], steps: list[int]) -> list[str]:
    _, request, *numbers = refusals[0]
    if len(steps) > MOST_CROSSES:
        return [f"{len(refusals):,} refusals"]
    if numbers:
        needed, free, largest = numbers
        return [
            f"request {request + 1} needs {needed:,}",
            f"{free:,} free, at most {largest:,} in a row",
        ]
    return [f"request {request + 1} refused"] if len(steps) == 1 else []


def clear_band(
    rows: Iterable[tuple[int, list[Run]]], left: float, right: float, tall: float, slots: float
) -> tuple[float, float] | None:
    """The highest slots ``[low, high)``, at least ``tall`` of them, that no run holds in the steps
    from ``left`` to ``right``; None if there are none."""
    held = sorted(
        (run.low, run.high) for step, runs in rows if left - 1 < step < right for run in runs
    )
    band, clear_from = None, 0.0
    for low, high in [*held, (slots, slots)]:
        if low - clear_from >= tall:
            band = clear_from, low
        clear_from = max(clear_from, high)
    return band
