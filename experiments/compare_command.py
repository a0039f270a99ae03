"""``kvalloc compare``: the same trace on several backends, side by side."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..geometry import KVGeometry
from . import compare_options as option
from .built_in_traces import BUILT_IN
from .commands import JsonFile, keep, require_folder, say_where
from .compare import Settings, compare
from .errors import BadInput
from .output import parse_bytes
from .readers import read_trace
from .specs import chosen_model, parse_specs, token_geometry
from .trace import MISSING, Trace


def register(app: typer.Typer) -> None:
    """Add the ``compare`` command."""
    app.command("compare")(compare_command)


def compare_command(
    trace: option.TraceName = "chat",
    backend: option.Backends = None,
    run: option.RunOrAccount = None,
    slots: option.Slots = None,
    model: option.Model = None,
    memory: option.Memory = None,
    dtype: option.Dtype = None,
    max_new: option.MaxNew = None,
    on_full: option.IfFull = "queue",
    on_failure: option.IfGrowthFails = "recompute",
    step_ms: option.StepMs = 25.0,
    limit: option.Limit = None,
    rate: option.Rate = None,
    device: option.Place = "auto",
    verify: option.Verify = False,
    layout: option.Order = "token-major",
    seed: option.Seed = 0,
    out: option.Out = Path("out"),
    json: JsonFile = None,
) -> None:
    """Replay one trace on several backends and show what each does with the memory.

    [cyan]kvalloc compare[/cyan] – a chat on real memory with real attention, under a minute

    [cyan]kvalloc compare hole --account --slots 80 -b contiguous:max -b paged:4 -b vmm:4[/cyan]

    [cyan]kvalloc compare requests.csv --account --model llama-3-8b --memory 16GiB[/cyan]

    A [bold]SPEC[/bold] is contiguous:POLICY[:PLACEMENT], paged:BLOCK or
    vmm[:PAGE][:interleaved]. Policies: max, limit, pow2, oracle, exact;
    placements: first-fit, best-fit, buddy. BLOCK is a number of tokens,
    PAGE a size as in 64KiB (with --slots a number of tokens).

    [bold]peak reserved[/bold] is what sequences held, [bold]waste[/bold] the part of it that held
    no token, [bold]fragmentation[/bold] the share of free memory outside the largest free run.
    """
    require_folder(out, json)
    real = slots is None if run is None else run
    if verify and not real:
        raise BadInput("--verify checks attention, which --account does not run: use --run")
    if memory is None and model is None and slots is None:
        memory = option.DEFAULT_MEMORY if trace in BUILT_IN else option.DEFAULT_MEMORY_OF_FILES
    geometry, memory_bytes = _memory(real, slots, model, memory, dtype)
    default = option.DEFAULT_BACKENDS if slots is None else option.DEFAULT_OF_SLOTS
    specs = parse_specs(backend or default, slots=slots is not None, notify=_notify)
    requests = _requests(trace, limit, max_new, rate, seed, geometry)
    place = choose_device(device, real)
    if place == "cuda" and dtype is None and geometry.dtype == "float32":
        geometry = geometry.with_dtype("bfloat16")  # the dense kernels of a GPU take no float32
    settings = Settings(
        specs,
        geometry,
        memory_bytes,
        run=real,
        on_full=on_full,
        on_failure=on_failure,
        step_ms=step_ms,
        device=place,
        layout=layout,
        verify=verify,
        seed=seed,
    )
    result = _with_progress(requests, settings, quiet=json == "-")
    if keep(result, out / "compare.json", json):
        _show(result, out)


def _notify(sentence: str) -> None:
    typer.echo(f"kvalloc: {sentence}", err=True)


def choose_device(wanted: option.Device, real: bool) -> str:
    """Torch's name of the device to run on.

    Raises
    ------
    BadInput
        A GPU was asked for and there is none, or nothing to run on it.
    """
    if not real and wanted == "cuda":
        raise BadInput("--device chooses where --run happens, and --account runs nothing")
    if not real or wanted == "cpu":
        return "cpu"
    # A replay times calls: a kernel that was only queued must not pass for one that ran.
    os.environ.setdefault("CUDA_LAUNCH_BLOCKING", "1")
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise BadInput("torch finds no GPU here: leave --device out, or use --device cpu")
    return "cpu"


def _memory(
    real: bool, slots: int | None, model: str | None, memory: str | None, dtype: str | None
) -> tuple[KVGeometry, int]:
    """Geometry and bytes that the options ask for."""
    if slots is not None:
        if real:
            raise BadInput("--slots counts tokens without a model: use --account with it")
        if model is not None or memory is not None or dtype is not None:
            raise BadInput("--slots stands for itself: leave out --model, --memory and --dtype")
        return token_geometry(slots)
    if memory is None:
        raise BadInput(f"--model {model} needs --memory SIZE, as in --memory 16GiB")
    geometry = chosen_model(model or option.DEFAULT_MODEL, dtype)
    return geometry, parse_bytes(memory)


def _requests(
    name: str,
    limit: int | None,
    max_new: str | None,
    rate: float | None,
    seed: int,
    geometry: KVGeometry,
) -> Trace:
    trace = read_trace(name, rate=rate, seed=seed)
    if limit is not None:
        trace = trace.head(limit)
    filled = trace.with_max_new(max_new, limit=geometry.max_context)
    if max_new is not None and not (trace.max_new == MISSING).any():
        _notify(f"max_new is given in every request of {trace.name}: --max-new changes none")
    return filled


def _with_progress(trace: Trace, settings: Settings, *, quiet: bool) -> dict[str, Any]:
    """Compare, with one bar per backend on standard error."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description:>20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        console=console,
        disable=quiet or not console.is_terminal,
        transient=True,
    )
    with bar:
        tasks = {spec.text: bar.add_task(spec.text, total=len(trace)) for spec in settings.specs}
        return compare(trace, settings, lambda name, done: bar.update(tasks[name], completed=done))


def _show(result: dict[str, Any], out: Path) -> None:
    """Figures first, so that the table can say where they are."""
    from .compare_figures import draw
    from .compare_tables import compare_table

    console = Console()
    for notice in result["trace"]["notices"]:
        console.print(Text(notice, style="dim"))
    figures = draw(result, out, notify=lambda text: console.print(Text(text, style="dim")))
    console.print(compare_table(result))
    say_where(out, ["compare.json", *(path.name for path in figures)])
    console.print(Text(f"As a page: kvalloc report {shlex.quote(str(out))}", style="dim"))
