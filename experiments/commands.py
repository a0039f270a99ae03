"""What the commands have in common: where a result goes, a bar that tells how far, and bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import BadInput
from .output import check_file, check_folder, emit_json, format_bytes, path_text


def _can_be_written(json: str | None) -> str | None:
    if json is not None and json != "-":
        check_file("--json", json)
    return json


JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        callback=_can_be_written,
        help="Write JSON there as well; - prints JSON and nothing else.",
    ),
]

Quick = Annotated[
    bool, typer.Option("--quick", help="A small form, seconds long, to see that it works.")
]


def require_folder(out: Path, json: str | None) -> None:
    """Tell before the work, and not after it, that ``--out`` cannot be written."""
    if json != "-":
        check_folder(out)


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


MOST_ROUNDS = 1_000_000
"""Times that a bench repeats what it times: more is a slip of the hand, and a list in memory."""


def check_memory(num_bytes: int, remedy: str) -> None:
    """Refuse what the memory that is free now cannot hold, before the system kills for it.

    Raises
    ------
    BadInput
        It says how much would be needed, and the remedy.
    """
    from ..vmm.system import available_bytes

    room = available_bytes()
    if num_bytes > room:
        raise BadInput(
            f"that takes {format_bytes(num_bytes)} of memory and {format_bytes(room)} are free: "
            f"{remedy}"
        )


@contextmanager
def progress_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, gone at the end; yields what to call with done and all."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal
    with Progress(console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
