"""The two pictures of a comparison: memory over time, and who holds which slot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import style
from .address_space import draw_address_space

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Backend = dict[str, Any]


def draw(
    compare: dict[str, Any],
    out_dir: str | Path,
    *,
    notify: Callable[[str], None] | None = None,
) -> list[Path]:
    """Draw the figures of a comparison as SVG and PNG.

    Parameters
    ----------
    compare
        What compare.json holds. The ``owners`` of a backend, if recorded, are
        ``{"steps": [step…], "slots": N, "rows": [[[start, stop, request, stored]…]…]}``: per
        step the token slots ``[start, stop)`` that each request holds (by its place in the
        trace, from 0), of which the first ``stored`` hold a token (unknown, if left out); and
        optionally ``"refusals": [[step, request, needed, free, largest_free]…]`` in tokens.
        Their ``numbers`` are for the report.
    out_dir
        Created if missing.
    notify
        Told in one sentence about a figure that cannot be drawn.

    Returns
    -------
    list of Path
        ``memory-over-time`` and, for small runs, ``address-space``, which is removed where it is
        an earlier run's; the same input gives the same bytes.
    """
    folder = Path(out_dir)
    with style.applied():
        paths = style.save(_draw_memory(compare), folder, "memory-over-time")
        recorded = [backend for backend in compare["backends"] if backend.get("owners")]
        if recorded:
            paths += style.save(draw_address_space(compare, recorded), folder, "address-space")
        else:
            for kind in style.FIGURE_KINDS:  # that of an earlier run would pass for this one's
                (folder / f"address-space.{kind}").unlink(missing_ok=True)
            if notify is not None:
                notify(
                    "no address-space figure: the run was too large to record who holds which slot"
                )
    return paths


def _draw_memory(compare: dict[str, Any]) -> Figure:
    """Live and reserved tokens over the steps, one panel per backend, the same axes for all."""
    backends = compare["backends"]
    figure, panels = style.panels(len(backends), height=2.1)
    most = max(backend["capacity_tokens"] for backend in backends)
    steps = [step for backend in backends for step in backend["series"]["step"]] or [0]
    for backend, axes in zip(backends, panels, strict=True):
        _draw_series(axes, backend)
        style.title(axes, backend["spec"], style.outcome(backend))
        axes.set_xlim(min(steps), max(steps) + 1)
        axes.set_ylim(0, most * 1.1)
    style.name_axes(panels, "step", "tokens")
    _legend(figure)
    style.heading(figure, f"Memory over time{style.of_trace(compare)}")
    return figure


def _draw_series(axes: Axes, backend: Backend) -> None:
    series, capacity = backend["series"], backend["capacity_tokens"]
    color = style.backend_style(backend["spec"]).color
    # A sample holds from the end of its step to the end of the next.
    step = [*series["step"], *(s + 1 for s in series["step"][-1:])]
    live, reserved = ([*series[key], *series[key][-1:]] for key in ("live", "reserved"))
    axes.fill_between(step, 0, live, step="post", color=style.tint(color, 0.25), linewidth=0)
    axes.fill_between(
        step, live, reserved, step="post", facecolor=style.tint(color, 0.8),
        hatch="////", edgecolor=style.tint(color, 0.45), linewidth=0,
    )  # fmt: skip
    axes.step(step, reserved, where="post", color=color, linewidth=1.1)
    axes.axhline(capacity, color=style.INK, linewidth=0.9, linestyle=(0, (4, 2)))
    axes.annotate(
        f"peaks: {backend['peak_reserved']:,} reserved, {backend['peak_waste']:,} wasted",
        (1, capacity), xycoords=("axes fraction", "data"), xytext=(-2, 2),
        textcoords="offset points", ha="right", va="bottom", fontsize=7.5, color=style.FAINT,
    )  # fmt: skip


def _legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure.legend(
        handles=[
            Patch(facecolor="#8a8a8a", label="live: tokens stored"),
            Patch(
                facecolor="#e6e6e6",
                edgecolor="#a8a8a8",
                hatch="////",
                linewidth=0,
                label="waste: reserved, no token in it",
            ),
            Line2D([], [], color="#555555", linewidth=1.1, label="reserved"),
            Line2D([], [], color=style.INK, linewidth=0.9, ls=(0, (4, 2)), label="capacity"),
        ],
        loc="outside lower center",
        ncols=4,
    )
