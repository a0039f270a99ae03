"""The command line's table of contents: which commands there are and what each is for."""

from __future__ import annotations

from typing import Annotated

import typer

from . import compare_command, plot_command, run_command, size_command, sweep_command, trace_command
from .bench import allocators as bench_allocators
from .bench import attention as bench_attention
from .bench import cache as bench_cache
from .bench import driver as bench_driver
from .bench import mapped as bench_mapped
from .gpu import command as gpu_check_command
from .report import command as report_command

app = typer.Typer(
    name="kvalloc",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="[dim]Exit codes: 0 done, 1 a check failed (gpu-check), 2 bad input (one sentence on "
    "standard error), 130 interrupted.[/dim]",
)
bench = typer.Typer(
    name="bench",
    no_args_is_help=True,
    help="Time one part alone: the books, an attention kernel, a model's cache, the memory driver.",
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
    mapped caches, side by side; [bold]run[/bold] answers one question with an experiment
    ([bold]list[/bold] names them), [bold]sweep[/bold] a grid of them; [bold]report[/bold] makes
    one page of their results; [bold]bench[/bold] times one part alone; [bold]size[/bold] and
    [bold]trace[/bold] tell about models and traces.

    [bold]Start here:[/bold]

    [cyan]kvalloc compare[/cyan] – a chat trace with real tensors and attention

    [cyan]kvalloc compare article --account --slots 80[/cyan] – bookkeeping only

    [cyan]kvalloc compare --help[/cyan] – the rest, with examples
    """


# Each module offers `register(app)`, and imports torch only inside the commands that need it.
COMMANDS = (
    compare_command,
    run_command,
    sweep_command,
    plot_command,
    report_command,
    size_command,
    trace_command,
    gpu_check_command,
)
for command in COMMANDS:
    command.register(app)
for module in (bench_allocators, bench_attention, bench_cache, bench_driver, bench_mapped):
    module.register(bench)
app.add_typer(bench)
