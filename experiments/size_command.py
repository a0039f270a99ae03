"""``kvalloc size``: what a KV cache of a well-known model weighs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..geometry import DTYPE_ALIASES, KVGeometry
from ..models import geometry, model_names
from .commands import JsonFile
from .errors import BadInput
from .output import emit_json, format_bytes
from .specs import chosen_model


def register(app: typer.Typer) -> None:
    """Add the ``size`` command."""
    app.command("size")(size)


def size(
    model: Annotated[
        str | None, typer.Option(help="A model's name, as in llama-3-8b; see --list.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one sequence, prompt and output.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences held at once.")] = 1,
    dtype: Annotated[
        str | None, typer.Option(help="Of the cache: bf16, fp8, … (default: the model's own).")
    ] = None,
    tp: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel GPUs; sizes are then of one GPU.")
    ] = 1,
    json: JsonFile = None,
    list_models: Annotated[bool, typer.Option("--list", help="List the known models.")] = False,
) -> None:
    """Say how much memory the KV cache of a model takes.

    [cyan]kvalloc size --model llama-3-8b --context 4096[/cyan] – half a GiB

    [cyan]kvalloc size --model gemma-3-27b --context 131072 --batch 4[/cyan] – windows help

    [cyan]kvalloc size --model llama-3-70b --context 8192 --dtype fp8 --tp 8 --json -[/cyan]

    JSON: bytes_total and bytes_windowed are of the whole batch; the latter
    leaves out what the sliding windows of the model no longer look at.
    """
    if list_models:
        _print_models(json)
        return
    if model is None or context is None:
        raise BadInput("name a model and a context, as in --model llama-3-8b --context 4096")
    shape = chosen_model(model, dtype, tp)
    if shape.max_context is not None and context > shape.max_context:
        typer.echo(
            f"kvalloc: warning: {context:,} tokens are beyond the limit of {shape.name}, "
            f"{shape.max_context:,}",
            err=True,
        )
    answer = {
        "model": shape.name,
        "dtype": shape.dtype,
        "context": context,
        "batch": batch,
        "tp": tp,
        "bytes_per_token": shape.bytes_per_token,
        "bytes_per_sequence": shape.bytes_per_token * context,
        "bytes_total": shape.bytes_per_token * context * batch,
        "bytes_windowed": shape.windowed_bytes(context) * batch,
    }
    if json is not None:
        emit_json(answer, json)
    if json != "-":
        _print_size(shape, answer)


def _print_size(shape: KVGeometry, answer: dict[str, Any]) -> None:
    of_one = " (one GPU)" if answer["tp"] > 1 else ""
    table = Table(title=f"KV cache of {shape.name}, {shape.dtype}{of_one}")
    table.add_column("")
    table.add_column("size", justify="right")
    table.add_column("bytes", justify="right")
    rows = [
        ("one token, all layers", "bytes_per_token"),
        (f"one sequence of {answer['context']:,} tokens", "bytes_per_sequence"),
        (f"batch of {answer['batch']:,}", "bytes_total"),
    ]
    if any(layer.window for layer in shape.layers):
        rows.append((f"batch of {answer['batch']:,}, outside windows evicted", "bytes_windowed"))
    for label, key in rows:
        table.add_row(label, format_bytes(answer[key]), f"{answer[key]:,}")
    Console().print(table)


def _print_models(json: str | None) -> None:
    models = [geometry(name) for name in model_names()]
    if json is not None:
        emit_json([_summary(model) for model in models], json)
    if json == "-":
        return
    short = {full: alias for alias, full in reversed(DTYPE_ALIASES.items())}
    table = Table(
        title="Known models (heads: query/KV; window: tokens × layers)",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("model", no_wrap=True)
    for header in ("layers", "heads", "dim", "window", "limit", "KiB/token"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("dtype")
    for model in models:
        row = _summary(model)
        window = f"{row['window']:,} ×{row['windowed_layers']}" if row["window"] else "–"
        table.add_row(
            model.name,
            str(row["layers"]),
            f"{row['q_heads']}/{row['kv_heads']}",
            str(row["head_dim"]),
            window,
            f"{row['max_context']:,}",
            f"{row['bytes_per_token'] / 1024:g}",
            short[model.dtype],
        )
    Console().print(table)


def _summary(model: KVGeometry) -> dict[str, Any]:
    """One row of the list; every preset's layers differ in nothing but the window."""
    windows = [shape.window for shape in model.layers if shape.window]
    return {
        "model": model.name,
        "layers": len(model.layers),
        "q_heads": model.q_heads,
        "kv_heads": model.layers[0].kv_heads,
        "head_dim": model.layers[0].head_dim,
        "window": windows[0] if windows else None,
        "windowed_layers": len(windows),
        "max_context": model.max_context,
        "dtype": model.dtype,
        "bytes_per_token": model.bytes_per_token,
    }
