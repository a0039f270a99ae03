"""Every figure of the docs, drawn anew from the results that are committed: ``make figures``."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .bench.attention_figure import plot as plot_attention
from .bench.cache import plot as plot_cache
from .built_in_traces import hole
from .compare import Settings, compare
from .compare_figures import draw
from .errors import BadInput
from .output import write_atomic
from .registry import NAMES, find
from .results_docs import DOCS, RESULTS
from .specs import parse_spec, token_geometry

Plot = Callable[[list[dict[str, Any]], Path], list[Path]]
BENCHES: dict[str, Plot] = {"bench_attention": plot_attention, "bench_cache": plot_cache}
HOLE = ("contiguous:max", "paged:4", "vmm:4")
"""The backends of docs/hole.svg, on 80 slots: a replay that only counts, made in place."""


def draw_results(out: Path, results: Path = RESULTS) -> Iterator[Path]:
    """Draw the figure of each result; yields the SVG files.

    Raises
    ------
    BadInput
        A result is missing.
    """
    plots = {find(name).stem: find(name).module.plot for name in NAMES} | BENCHES
    for stem, plot in plots.items():
        try:
            document = json.loads((results / f"{stem}.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInput(f"{stem}.json is missing in {results}: {error.strerror}") from error
        yield from (path for path in plot(document["rows"], out) if path.suffix == ".svg")


def draw_hole(out: Path) -> Path:
    """Draw the same trace in three address spaces; returns the SVG file."""
    geometry, memory_bytes = token_geometry(80)
    specs = tuple(parse_spec(text, slots=True) for text in HOLE)
    compared = compare(hole(), Settings(specs, geometry, memory_bytes, run=False))
    (path,) = (file for file in draw(compared, out) if file.name == "address-space.svg")
    return path


def main() -> None:
    """Draw all figures; exits with 2 if a result is missing."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        try:
            drawn = {RESULTS / path.name: path for path in draw_results(out)}
        except BadInput as error:
            print(f"kvalloc: {error}", file=sys.stderr)
            sys.exit(2)
        drawn[DOCS / "hole.svg"] = draw_hole(out)
        for target, path in drawn.items():
            print(write_atomic(target, path.read_bytes()))


if __name__ == "__main__":
    main()
