"""The command line's table of contents: which commands there are and what each is for."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from . import (
    bench_driver,
    compare_command,
    gpu_check_command,
    plot_command,
    size_command,
    trace_command,
)

app = typer.Typer(
    name="kvalloc",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="[dim]Exit codes: 0 done, 2 bad input (one sentence on standard error), "
    "130 interrupted.[/dim]",
)
bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Time one part alone: an attention kernel, the memory driver.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"kvalloc {version('kvalloc')}")
        raise typer.Exit


@app.callback()
def _overview(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Three memory backends for a KV cache behind one interface.

    [bold]compare[/bold] replays a trace of requests on contiguous, paged and virtual-memory
    mapped caches, side by side; [bold]bench[/bold] times one part alone; [bold]size[/bold] and
    [bold]trace[/bold] answer questions about models and request traces.

    [bold]Start here:[/bold]

    [cyan]kvalloc compare[/cyan] – a chat trace with real tensors and attention

    [cyan]kvalloc compare article --account --slots 80[/cyan] – bookkeeping only

    [cyan]kvalloc compare --help[/cyan] – the rest, with examples
    """


# Each module offers `register(app)`, and imports torch only inside the commands that need it.
for module in (compare_command, gpu_check_command, plot_command, size_command, trace_command):
    module.register(app)
bench_driver.register(bench)
if find_spec(f"{__package__}.bench_attention"):
    import_module(".bench_attention", __package__).register(bench)
app.add_typer(bench)
