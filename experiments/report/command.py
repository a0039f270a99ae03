"""``kvalloc report``: a folder of results as one page for a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import BadInput
from ..output import check_file, format_bytes, path_text, write_atomic
from .read import Results, read_results


def register(app: typer.Typer) -> None:
    """Add the ``report`` command."""
    app.command("report")(report_command)


def report_command(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="What --out of other commands named.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page (default: DIR/report.html).")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write one HTML page about all results in a folder, for any browser.

    [cyan]kvalloc compare hole --account --slots 80 --out out/hole[/cyan]

    [cyan]kvalloc report out/hole --open[/cyan] – tables, figures, a map with a slider

    [cyan]kvalloc report docs/results/cpu --out all.html[/cyan] – of run and bench

    The page is one file and needs no network. Its [bold]map[/bold] shows who owns
    which slot at each step, all backends side by side. It is there for small
    comparisons, whose JSON records the owners (at most 200 requests). Move with
    the slider or the arrow keys, play with space, point at a slot for its owner;
    [bold]report.html#step=3[/bold] links to a step.
    """
    from .page import page

    results = read_results(folder)
    target = folder / "report.html" if out is None else out
    _check_target(target, results)
    path = write_atomic(target, page(results))
    for name in results.skipped:
        typer.echo(f"kvalloc: {name} has no table and is left out", err=True)
    typer.echo(f"Written to {path_text(path)} ({format_bytes(path.stat().st_size)})")
    if open_it:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


def _check_target(target: Path, results: Results) -> None:
    """A page must not take the place of what it tells about."""
    if target.is_dir():
        raise BadInput(f"--out {target} is a folder: name a file, as in {target / 'report.html'}")
    read = [*(document.path for document in results.documents), *results.pictures]
    if any(target.resolve() == path.resolve() for path in read):
        raise BadInput(f"--out {target} would overwrite a result: name another file")
    check_file("--out", target)
