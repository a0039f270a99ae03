"""What the commands have in common: where a result goes, and a bar that tells how far they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import BadInput
from .output import emit_json, path_text


def _no_folder(json: str | None) -> str | None:
    if json is not None and json != "-" and Path(json).is_dir():
        raise BadInput(f"--json {json} is a folder: name a file")
    return json


JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        callback=_no_folder,
        help="Write JSON there as well; - prints JSON and nothing else.",
    ),
]


def require_folder(out: Path, json: str | None) -> None:
    """Tell before the work, and not after it, that ``--out`` is a file."""
    if json != "-" and out.exists() and not out.is_dir():
        raise BadInput(f"--out {out} is a file: name a folder")


def keep(document: dict[str, Any], path: Path, json: str | None) -> bool:
    """Write a result to its file, and where ``--json`` says; whether there is more to show.

    ``--json -`` leaves no file: it prints the result, and nothing else may be printed.
    """
    if json != "-":
        emit_json(document, path)
    if json is not None:
        emit_json(document, json)
    return json != "-"


def say_where(out: Path, names: Iterable[str]) -> None:
    """The files that a command leaves. Their folder is the user's word: text, and not markup."""
    from rich.console import Console
    from rich.text import Text

    Console().print(Text(f"Written to {path_text(out)}/: {', '.join(names)}"))


@contextmanager
def progress_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, gone at the end; yields what to call with done and all."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=quiet, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
