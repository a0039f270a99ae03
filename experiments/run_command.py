"""``kvalloc run`` and ``kvalloc list``: one command per question."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .commands import JsonFile, Quick, keep, progress_bar, require_folder, say_where
from .registry import NAMES, Experiment, Report, find, result
from .row_tables import Row


def register(app: typer.Typer) -> None:
    """Add the ``run`` and ``list`` commands."""
    app.command("run")(run_command)
    app.command("list")(list_command)


def list_command() -> None:
    """List the questions that [cyan]kvalloc run[/cyan] answers."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False)
    table.add_column("kvalloc run", style="bold", no_wrap=True)
    table.add_column("takes about", justify="right", no_wrap=True)
    table.add_column("question")
    for name, seconds in NAMES.items():
        experiment = find(name)
        suffix = " [dim](simulated)[/dim]" if experiment.module.SIMULATED else ""
        table.add_row(name, in_words(seconds), experiment.question + suffix)
    Console().print(table)


def in_words(seconds: int) -> str:
    """A rough duration.

    >>> in_words(20), in_words(170)
    ('20 s', '3 min')
    """
    return f"{seconds} s" if seconds < 90 else f"{round(seconds / 60)} min"


def run_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(NAMES)}.")],
    quick: Quick = False,
    out: Annotated[Path, typer.Option(help="Folder for NAME.json and the figure.")] = Path("out"),
    json: JsonFile = None,
) -> None:
    """Answer one question: rows as JSON, a figure, a table.

    [cyan]kvalloc list[/cyan] – what each name asks, and how long it takes

    [cyan]kvalloc run policies[/cyan] – how much of the memory holds tokens, policy by policy

    [cyan]kvalloc run block-size --quick[/cyan] – small, to see that it works

    Recorded traces are looked for in the folder that KVALLOC_TRACES names
    (default ../shared/traces); where there are none, generated ones stand in, with a notice.
    """
    experiment = find(name)
    config = experiment.module.QUICK if quick else experiment.module.CONFIG
    require_folder(out, json)
    report = Report()
    with progress_bar(experiment.name, quiet=json == "-") as report.progress:
        rows = experiment.module.run(config, report)
    document = result(experiment, {"quick": quick, **asdict(config)}, report, rows)
    path = out / f"{experiment.stem}.json"
    if keep(document, path, json):
        _show(experiment, report, rows, [path, *experiment.module.plot(rows, out)])


def _show(experiment: Experiment, report: Report, rows: list[Row], paths: list[Path]) -> None:
    from rich.console import Console
    from rich.text import Text

    from .row_tables import show

    console = Console()
    title = experiment.name + (" (simulated)" if experiment.module.SIMULATED else "")
    console.print(experiment.question, style="bold")
    show(experiment.module.COLUMNS, rows, title)
    console.print(experiment.refuted_if, style="italic")
    for notice in report.notices:
        console.print(Text(notice, style="dim"))
    say_where(paths[0].parent, [path.name for path in paths])
