"""``kvalloc gpu-check``: one command for a machine with a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .check import DEFAULT_MINUTES, DEFAULT_OUT, EXIT_WRONG, gpu_check


def register(app: typer.Typer) -> None:
    """Add the ``gpu-check`` command."""
    app.command("gpu-check")(gpu_check_command)


def gpu_check_command(
    out: Annotated[
        Path, typer.Option(help="Folder for one JSON per stage and gpu_check.json.")
    ] = DEFAULT_OUT,
    minutes: Annotated[float, typer.Option(help="For everything together.")] = DEFAULT_MINUTES,
    dry: Annotated[
        bool,
        typer.Option("--dry", help="Without a GPU: CUDA's calls go to a library that checks them."),
    ] = False,
) -> None:
    """Check everything that only a GPU can show, and measure it.

    [cyan]kvalloc gpu-check[/cyan] – driver, mapped memory, guards, kernels, a trace: 5 minutes

    [cyan]kvalloc gpu-check --dry[/cyan] – in a source tree, what can be checked without a GPU

    Exit code 1 if anything is wrong. Without this command's libraries the same is
    [cyan]python3 -m kvalloc.experiments.gpu.check[/cyan].
    """
    if not gpu_check(out, minutes, dry=dry):
        raise typer.Exit(EXIT_WRONG)
