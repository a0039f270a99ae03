"""``kvalloc sweep``: trace × backend × page size × memory × policy, on all cores, resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from .commands import JsonFile, keep, progress_bar, require_folder, say_where
from .errors import BadInput
from .row_tables import Column, Columns, Row
from .scheduling import OnFailure
from .sweep import grid, sweep

ON_FAILURE: tuple[OnFailure, ...] = get_args(OnFailure)
COLUMNS: Columns = (
    Column("trace", "trace"),
    Column("backend", "backend"),
    Column("memory", "memory"),
    Column("on failure", "on_failure"),
    Column("done", "completed"),
    Column("preempted", "preemptions"),
    Column("peak reserved", "peak_reserved"),
    Column("peak waste", "peak_waste"),
)


def register(app: typer.Typer) -> None:
    """Add the ``sweep`` command."""
    app.command("sweep")(sweep_command)


def sweep_command(
    trace: Annotated[
        list[str], typer.Option("--trace", "-t", help="A built-in name or a file. Repeat it.")
    ],
    backend: Annotated[
        list[str],
        typer.Option(
            "--backend", "-b", metavar="SPEC", help="A SPEC, or a family for each page or policy."
        ),
    ],
    memory: Annotated[list[str], typer.Option(help="As in 16GiB. Repeat it.")],
    model: Annotated[str, typer.Option(help="Whose cache it is: kvalloc size --list.")],
    page: Annotated[
        list[str] | None,
        typer.Option(metavar="TOKENS|SIZE", help="16: of paged; 64KiB: of vmm. Repeat it."),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Of contiguous. Repeat it.")] = None,
    on_failure: Annotated[
        list[str] | None,  # typer takes no list of literals
        typer.Option(metavar="|".join(ON_FAILURE), help="Repeat it (default: recompute)."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first N requests of each trace.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of whatever is random.")] = 0,
    jobs: Annotated[int, typer.Option(min=-1, help="Processes; -1: all cores.")] = -1,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="tcp://HOST:PORT", help="A Dask scheduler whose workers compute."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the finished cells and sweep.json.")] = Path(
        "out/sweep"
    ),
    json: JsonFile = None,
) -> None:
    """Replay a whole grid on the books; what is finished already is not computed again.

    [cyan]kvalloc sweep -t chat -t burst -b paged --page 8 --page 16 -b contiguous --policy max
    --policy exact --model tiny --memory 8MiB --memory 16MiB[/cyan]

    [bold]paged[/bold] takes each --page that is a number of tokens, [bold]vmm[/bold] each that
    is a size, [bold]contiguous[/bold] each --policy; a whole SPEC, as in
    paged:16, stands for itself. The same command, typed again after an
    interruption, goes on where it was; what changed in trace or code is
    computed anew.
    """
    cells = grid(
        trace,
        backend,
        model,
        memory,
        pages=page or (),
        policies=policy or (),
        on_failures=[_known(word) for word in on_failure or ("recompute",)],
        limit=limit,
        seed=seed,
    )
    require_folder(out, None)  # the cells lie there in any case
    with progress_bar("cells", quiet=json == "-") as progress:
        rows, num_computed = sweep(cells, out, jobs=jobs, cluster=cluster, progress=progress)
    _tell(rows, num_computed, out, json)


def _known(word: str) -> OnFailure:
    for known in ON_FAILURE:
        if word == known:
            return known
    raise BadInput(f"--on-failure takes one of {', '.join(ON_FAILURE)}, not {word!r}")


def _tell(rows: list[Row], num_computed: int, out: Path, json: str | None) -> None:
    from rich.console import Console
    from rich.text import Text

    from .environment import environment
    from .row_tables import show

    document = {"schema": 1, "experiment": "sweep", "environment": environment(), "rows": rows}
    if not keep(document, out / "sweep.json", json):
        return
    console = Console()
    title = f"{len(rows)} cells, {num_computed} computed now"
    show(COLUMNS, rows, title)
    for row in rows:
        if row["error"]:
            told = f"{row['backend']}, {row['memory']}: {row['error']}"
            console.print(Text(told, style="dim"))
    say_where(out, ["sweep.json"])
