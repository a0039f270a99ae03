"""One look for all figures: a backend has the same colour, line and marker wherever it is drawn.

Families differ in hue *and* in line and marker, members of a family in lightness, so that a
grey print can still be read. matplotlib is imported by the functions that draw.
"""

from __future__ import annotations

import colorsys
import warnings
from contextlib import AbstractContextManager
from io import BytesIO
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import BadInput
from .output import counted, parse_bytes, write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#222222"
FAINT = "#6b6b6b"
REFUSED = "#b00020"
FIGURE_KINDS: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
}
"""What a figure is written as, and what of that would differ from run to run."""

RC: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.h_pad": 0.06,
    "figure.constrained_layout.w_pad": 0.06,
    "figure.facecolor": "white",
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "hatch.linewidth": 0.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.fonttype": "none",  # text stays text: it can be searched, and read aloud
    "svg.hashsalt": "kvalloc",
    "text.color": INK,
    "xtick.color": FAINT,
    "xtick.labelsize": 8,
    "ytick.color": FAINT,
    "ytick.labelsize": 8,
}


class BackendStyle(NamedTuple):
    """How a backend is drawn; line and marker are matplotlib's names."""

    color: str
    line: str
    marker: str


_CONTIGUOUS = {
    "max": "#b5480a",
    "limit": "#7a2a05",
    "pow2": "#8f6a2a",
    "oracle": "#c99a2e",
    "exact": "#dd9a2b",
}
_PLACEMENT_LINES = {"first-fit": "solid", "best-fit": "dashed", "buddy": "dotted"}
_BLUE, _GREEN = (0.57, 0.56, 0.66), (0.46, 0.46, 0.5)  # hue, lightness, saturation
_OTHER = BackendStyle("#555555", "dotted", "D")


def backend_style(spec: str) -> BackendStyle:
    """The look of a backend by its SPEC string alone, so that it never depends on its company.

    >>> backend_style("paged:16") == backend_style("paged:16")
    True
    """
    family, *rest = spec.split(":")
    if family == "contiguous" and rest and rest[0] in _CONTIGUOUS:
        line = _PLACEMENT_LINES.get(rest[1] if rest[1:] else "first-fit", "solid")
        return BackendStyle(_CONTIGUOUS[rest[0]], line, "o")
    if family == "paged":
        return BackendStyle(_shade(_BLUE, _page_order(rest) / 8), "dashed", "s")
    if family == "vmm":
        order = _page_order(rest)  # of tokens, or of bytes: OS pages and more
        return BackendStyle(
            _shade(_GREEN, (order - 12) / 18 if order >= 12 else order / 8), "dashdot", "^"
        )
    return _OTHER


def _page_order(rest: list[str]) -> float:
    """log2 of the page size in a SPEC; that of 16, the usual one, where none is given."""
    try:
        return log2(parse_bytes(rest[0])) if rest else 4.0
    except BadInput:
        return 4.0


def _shade(family: tuple[float, float, float], darkness: float) -> str:
    """The larger the page, the darker."""
    hue, lightness, saturation = family
    lightness -= 0.55 * lightness * min(max(darkness, 0.0), 1.0)
    red, green, blue = colorsys.hls_to_rgb(hue, lightness, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))


def tint(color: str, amount: float) -> str:
    """``color`` mixed with white; ``amount`` 0 leaves it, 1 is white."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * amount):02x}" for part in parts)


# Neighbours in this order differ in lightness, since requests that arrive one after the other
# often lie side by side.
_REQUESTS = (
    "#33658a",
    "#c9821f",
    "#7b2d43",
    "#5d9fc4",
    "#3f6b3c",
    "#c9728a",
    "#4b3f72",
    "#86a03a",
    "#8a4b1f",
    "#8c78ad",
)
NUM_REQUEST_COLORS = len(_REQUESTS)


def request_color(request: int) -> str:
    """The colour of a request by its place in the trace."""
    return _REQUESTS[request % NUM_REQUEST_COLORS]


def applied() -> AbstractContextManager[None]:
    """The look, for as long as a figure is made *and* saved: matplotlib reads it at both times."""
    import matplotlib

    settings: Any = RC  # its names are a long Literal
    return matplotlib.rc_context(settings)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``name.svg`` and ``name.png``, whole, the same bytes for the same figure."""
    paths = []
    with warnings.catch_warnings():
        # A trace may be called in letters that our font lacks: boxes in the PNG, text in the SVG.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, the same in both files
        for kind, about in FIGURE_KINDS.items():
            buffer = BytesIO()
            figure.savefig(buffer, format=kind, dpi=160, metadata=about)
            paths.append(write_atomic(folder / f"{name}.{kind}", buffer.getvalue()))
    return paths


def panels(count: int, *, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of small multiples that share both axes: at most three in a row."""
    from matplotlib.figure import Figure

    columns = count if count <= 3 else 2 if count == 4 else 3
    rows = -(-count // columns)
    width = 9.6 if columns > 1 else 6.4
    figure = Figure(figsize=(width, rows * height + 1.0), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    flat = [axes for row in grid for axes in row]
    for axes in flat[count:]:
        axes.remove()
    return figure, flat[:count]


def title(axes: Axes, name: str, detail: str) -> None:
    """A panel's name and, in smaller type, what came of it."""
    axes.annotate(
        printable(name), (0, 1), xycoords="axes fraction", xytext=(0, 18),
        textcoords="offset points", fontsize=9.5, fontweight="bold", parse_math=False,
    )  # fmt: skip
    axes.annotate(
        detail, (0, 1), xycoords="axes fraction", xytext=(0, 6), textcoords="offset points",
        fontsize=7.5, color=FAINT,
    )  # fmt: skip


def outcome(backend: dict[str, Any]) -> str:
    """What became of the requests, in a few words; what did not happen is left out."""
    parts = [f"{backend['completed']:,} completed"]
    for key, one, more in (
        ("rejected", "rejected", "rejected"),
        ("growth_failures", "growth refused", "growths refused"),
        ("preemptions", "preemption", "preemptions"),
    ):
        if backend[key]:
            parts.append(f"{backend[key]:,} {one if backend[key] == 1 else more}")
    return ", ".join(parts)


def name_axes(axes: list[Axes], x: str, y: str) -> None:
    """Name the axes left and below; steps are numbered under the lowest panel of each column."""
    for i, panel in enumerate(axes):
        place = panel.get_subplotspec()
        assert place is not None
        columns = place.get_gridspec().ncols
        panel.tick_params(labelbottom=i + columns >= len(axes))
        panel.xaxis.set_major_formatter(thousands())
        panel.yaxis.set_major_formatter(thousands())
        if i + columns >= len(axes):
            panel.set_xlabel(x)
        if place.is_first_col():
            panel.set_ylabel(y)


def thousands() -> Any:
    """A tick formatter with thousands separators and no digits behind the point."""
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:,.0f}" if value == int(value) else "")


def of_trace(compare: dict[str, Any]) -> str:
    """`` · trace chat, 48 requests``, as far as it is known."""
    trace = compare.get("trace") or {}
    text = f" · trace {trace['name']}" if trace.get("name") else ""
    return text + (f", {counted(trace['requests'], 'request')}" if trace.get("requests") else "")


def heading(figure: Figure, text: str) -> None:
    """The figure's title, above and left; not a formula, whatever a trace is called."""
    figure.suptitle(
        printable(text), x=0.01, ha="left", fontsize=11, fontweight="bold", parse_math=False
    )


def printable(text: str) -> str:
    """Somebody else's text without control signs and halves of characters: XML cannot hold them.

    >>> printable("a\\x1b[31m")
    'a?[31m'
    """
    return "".join(sign if sign.isprintable() else "?" for sign in text)
