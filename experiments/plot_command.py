"""``kvalloc plot``: draw the figures of a comparison again from its JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .compare_read import read_compare
from .errors import blaming
from .output import check_folder


def register(app: typer.Typer) -> None:
    """Add the ``plot`` command."""
    app.command("plot")(plot)


def plot(
    compare: Annotated[
        Path, typer.Argument(metavar="COMPARE.JSON", help="Written by kvalloc compare.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the figures (default: that of the JSON).")
    ] = None,
) -> None:
    """Draw the figures of a comparison again.

    [cyan]kvalloc plot out/compare.json[/cyan] – beside the JSON

    [cyan]kvalloc plot out/compare.json --out figures[/cyan] – somewhere else

    Each figure is written as SVG and PNG; the same JSON gives the same bytes.
    """
    from .compare_figures import draw

    def notify(sentence: str) -> None:
        typer.echo(f"kvalloc: {sentence}", err=True)

    loaded = read_compare(compare)
    folder = out if out is not None else compare.parent
    check_folder(folder)
    with blaming(f"{compare} holds numbers that no figure can show; run kvalloc compare again"):
        paths = draw(loaded, folder, notify=notify)
    for path in paths:
        typer.echo(path)
