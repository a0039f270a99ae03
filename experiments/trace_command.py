"""``kvalloc trace``: look at request traces, generate them, convert them."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .built_in_traces import BUILT_IN
from .commands import JsonFile
from .errors import BadInput
from .generators import KINDS, generate
from .output import counted, emit_json, path_text
from .readers import read_trace
from .trace import Trace
from .trace_summary import summarise
from .writers import check_target, write_trace

trace_app = typer.Typer(
    name="trace",
    no_args_is_help=True,
    help="Look at request traces, generate them, convert them.",
    rich_markup_mode="rich",
)

_NAME = "A built-in name (see [cyan]kvalloc trace list[/cyan]) or a file, plain or gzip."
_RATE = "Requests per second of Poisson arrivals, 1e-6 to 1e6"
_SEED = "Seed of everything random; the same seed gives the same trace."


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.add_typer(trace_app)


@trace_app.command("list")
def list_traces() -> None:
    """List the built-in traces and the kinds that [cyan]generate[/cyan] knows."""
    table = Table("name", "requests", "what it is", title="Traces without a file", box=None)
    for name, (what, make) in BUILT_IN.items():
        table.add_row(name, str(len(make(0))), what)
    table.add_section()
    for name, kind in KINDS.items():
        table.add_row(name, f"{kind.requests:,}", f"generated: {kind.what}")
    Console().print(table)


@trace_app.command()
def describe(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help=_NAME)],
    page_size: Annotated[
        int, typer.Option(help="Tokens per page, for prefix_hit_fraction.", min=1)
    ] = 16,
    rate: Annotated[float | None, typer.Option(help=f"{_RATE}, for length sets.")] = None,
    step_ms: Annotated[float, typer.Option(help="Length of a step, for traces in steps.")] = 25.0,
    seed: Annotated[int, typer.Option(help=_SEED)] = 0,
    json: JsonFile = None,
) -> None:
    """Say what a trace is like: totals, lengths, span, repeated prefixes.

    Formats are recognised by header or keys: our own CSV and JSON lines, Azure, Vidur and
    BurstGPT CSV, length sets, Mooncake, Qwen-Bailian and Weka JSON lines.

    [bold]prefix_hit_fraction[/bold]: share of all prompt tokens that lie in full pages which
    an earlier request had too, with infinite memory.

    [bold]Examples[/bold]

    [cyan]kvalloc trace describe chat[/cyan]

    [cyan]kvalloc trace describe mooncake.jsonl --page-size 512[/cyan]

    [cyan]kvalloc trace describe azure.csv.gz --json -[/cyan]
    """
    summary = summarise(
        read_trace(trace, rate=rate, seed=seed), page_size=page_size, step_ms=step_ms
    )
    if json is not None:
        emit_json(summary, json)
    if json != "-":
        _print(summary)


@trace_app.command("generate")
def generate_trace(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="One of: " + ", ".join(KINDS) + ".")],
    out: Annotated[str, typer.Option(help="File to write, .csv or .jsonl.")],
    requests: Annotated[int | None, typer.Option(help="How many (default: the kind's).")] = None,
    seed: Annotated[int, typer.Option(help=_SEED)] = 0,
    rate: Annotated[
        float | None, typer.Option(help=f"{_RATE} (default: the kind's; 0: all at once).")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(metavar="LOW:HIGH", help="Uniform prompt tokens; one number for all alike."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="LOW:HIGH", help="Uniform output tokens; one number for all alike."),
    ] = None,
) -> None:
    """Generate a trace and write it in our own format.

    [bold]Examples[/bold]

    [cyan]kvalloc trace generate canonical --out canonical.csv[/cyan]

    [cyan]kvalloc trace generate sharegpt --requests 2000 --rate 8 --out share.csv[/cyan]

    [cyan]kvalloc trace generate uniform --prompt 10:20 --output 1:5 --out small.csv[/cyan]

    [cyan]kvalloc trace generate shared-prefix --seed 7 --out turns.jsonl[/cyan]
    """
    check_target(out)
    made = generate(
        kind,
        requests=requests,
        seed=seed,
        rate=rate,
        prompt=_bounds("--prompt", prompt),
        output=_bounds("--output", output),
    )
    _write(made, out)


@trace_app.command()
def convert(
    trace: Annotated[str, typer.Argument(metavar="IN", help=_NAME)],
    out: Annotated[str, typer.Argument(metavar="OUT", help="File to write, .csv or .jsonl.")],
    limit: Annotated[
        int | None, typer.Option(help="Keep the first so many requests.", min=1)
    ] = None,
    rate: Annotated[float | None, typer.Option(help=f"{_RATE}, for length sets.")] = None,
    seed: Annotated[int, typer.Option(help=_SEED)] = 0,
) -> None:
    """Convert any trace to our own CSV or JSON lines.

    [bold]Examples[/bold]

    [cyan]kvalloc trace convert AzureLLMInferenceTrace_conv.csv azure.csv[/cyan]

    [cyan]kvalloc trace convert lengths.csv timed.csv --rate 4 --seed 1[/cyan]

    [cyan]kvalloc trace convert chat chat.jsonl[/cyan]
    """
    check_target(out)
    read = read_trace(trace, rate=rate, seed=seed)
    read = read if limit is None else read.head(limit)
    for notice in read.notices:
        typer.echo(notice, err=True)
    _write(read, out)


def _write(trace: Trace, out: str) -> None:
    typer.echo(f"{path_text(write_trace(trace, out))}: {counted(len(trace), 'request')}")


def _bounds(option: str, text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    low, colon, high = text.partition(":")
    digits = [part for part in (low, high if colon else low) if re.fullmatch("[0-9]{1,18}", part)]
    if len(digits) < 2:
        raise BadInput(f"{option} takes LOW:HIGH (as in 500:1500) or one number, not {text!r}")
    return int(digits[0]), int(digits[1])


def _print(summary: dict[str, Any]) -> None:
    table = Table(title=Text(summary["name"]), show_header=False, box=None)
    table.add_row("requests", f"{summary['requests']:,}")
    table.add_row("span", f"{summary['span_s']:,.3f} s")
    table.add_row("prompt tokens", f"{summary['prompt_tokens']:,}")
    table.add_row("output tokens", f"{summary['output_tokens']:,}")
    table.add_row("largest context", f"{summary['max_context']:,} tokens")
    shared = "unknown: the trace has no prefixes"
    if summary["has_prefixes"]:
        shared = f"{summary['prefix_hit_fraction']:.1%} in pages of {summary['page_size']}"
    table.add_row("found in earlier prompts", shared)
    for count in ("failed", "skipped", "max_new_missing"):
        if summary[count]:
            table.add_row(count.replace("_", " "), f"{summary[count]:,}")
    lengths = Table("tokens", "mean", "min", "p50", "p90", "p99", "max", box=None)
    for column in lengths.columns[1:]:
        column.justify = "right"
    for name in ("prompt", "output", "max_new"):
        if spread := summary[name]:
            whole = [f"{value:,}" for value in list(spread.values())[1:]]
            lengths.add_row(name, f"{spread['mean']:,.1f}", *whole)
    console = Console()
    console.print(table)
    console.print(lengths)
    for notice in summary["notices"]:
        console.print(Text(f"note: {notice}", style="yellow"))
