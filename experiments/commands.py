"""What the commands have in common: the option for JSON, and a bar that tells how far a run is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="JSON there instead; - prints only JSON."),
]


@contextmanager
def progress_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, gone at the end; yields what to call with done and all."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=quiet, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
