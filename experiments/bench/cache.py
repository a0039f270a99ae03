"""What does a cache cost a transformers model per token, and how much memory does it take?

transformers' own caches and ours, side by side in every round: the update of one layer, a decode
step of a small model with random weights, and by how much the process grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from ...geometry import ITEMSIZE
from ..commands import (
    MOST_ROUNDS,
    JsonFile,
    Quick,
    check_memory,
    keep,
    progress_bar,
    require_folder,
    say_where,
)
from ..errors import BadInput
from ..registry import bench_result
from ..row_tables import Column, Columns, Row, show

COLUMNS: Columns = (
    Column("cache", "cache"),
    Column("context", "context"),
    Column("batch", "batch"),
    Column("KV heads", "kv_heads"),
    Column("update, µs", "update_us"),
    Column("decode, ms per token", "decode_ms_per_token"),
    Column("resident, MiB", "resident_mib"),
)


@dataclass(frozen=True)
class Config:
    """Contexts, shape of the model (two layers), rounds, and the length that memory is for."""

    contexts: tuple[int, ...] = (1024, 2048, 4096, 8192)
    batch: int = 1
    kv_heads: int = 8
    q_heads: int = 8
    head_dim: int = 128
    dtype: str = "float32"
    num_rounds: int = 100
    max_length: int = 32768


QUICK = Config(contexts=(64,), num_rounds=3, max_length=256)


def register(bench: typer.Typer) -> None:
    """Add the ``cache`` bench."""
    bench.command("cache")(cache_command)


def run(
    config: Config, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Row]:
    """Time every cache at every context.

    Parameters
    ----------
    config
        What to time, and how often.
    progress
        Called with phases done and phases in all.

    Returns
    -------
    list of dict
        ``cache, context, batch, kv_heads``; ``update_us``: median microseconds of one layer's
        update with one token a row; ``decode_ms_per_token``: median milliseconds of a forward of
        the model, for caches whose maximum is just what the rounds need; ``resident_mib``: by how
        much a cache for ``max_length`` tokens, with ``context`` stored, makes the process grow.

    Raises
    ------
    BadInput
        transformers is missing, a count that times nothing, or more than the memory holds.
    """
    if find_spec("transformers") is None:
        raise BadInput("transformers is missing: pip install 'kvalloc[transformers]'")
    _check(config)
    import torch

    from .cache_rounds import Point, decode_times, resident_bytes, subjects, update_times

    rows: list[Row] = []
    dtype = getattr(torch, config.dtype)
    for n, context in enumerate(sorted(config.contexts)):
        point = Point(
            context, config.batch, config.kv_heads, config.q_heads, config.head_dim, dtype
        )
        with torch.no_grad():
            progress(3 * n, 3 * len(config.contexts))
            all_of = subjects(point)
            resident = {s.name: resident_bytes(s, point, config.max_length) for s in all_of}
            progress(3 * n + 1, 3 * len(config.contexts))
            updates = update_times(all_of, point, config.num_rounds)
            progress(3 * n + 2, 3 * len(config.contexts))
            decodes = decode_times(all_of, point, config.num_rounds)
        rows += [
            {
                "cache": name,
                "context": context,
                "batch": config.batch,
                "kv_heads": config.kv_heads,
                "update_us": median(updates[name]),
                "decode_ms_per_token": median(decodes[name]),
                "resident_mib": resident[name] / 2**20,
            }
            for name in updates
        ]
    return rows


def _check(config: Config) -> None:
    if not config.contexts or min(config.contexts) < 1 or config.num_rounds < 1:
        raise BadInput("there is nothing to time: give contexts and rounds of at least 1")
    if max(config.contexts) > config.max_length:
        raise BadInput(
            f"a context of {max(config.contexts)} tokens is beyond --max-length "
            f"{config.max_length}: give a larger one"
        )
    if config.batch < 1 or config.kv_heads < 1 or config.q_heads % config.kv_heads:
        raise BadInput(
            f"{config.q_heads} query heads cannot share {config.kv_heads} KV heads evenly: "
            "give a multiple"
        )
    check_memory(_bytes(config), "give fewer rows, heads, rounds or --max-length")


def _bytes(config: Config) -> int:
    """Memory that a run takes at the least: full caches side by side, or one for the maximum."""
    hidden = config.q_heads * config.head_dim
    weights = 2 * 2 * 7 * hidden**2 * ITEMSIZE[config.dtype]  # two models of two layers
    token = 2 * 2 * config.batch * config.kv_heads * config.head_dim * ITEMSIZE[config.dtype]
    side_by_side = 6 * (max(config.contexts) + config.num_rounds)
    return weights + token * max(side_by_side, config.max_length)


def plot(rows: list[Row], out: Path) -> list[Path]:
    """Draw update time, decode time and resident memory over the context."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    from .. import style

    looks = {
        "DynamicCache": (style.INK, "dotted", "D"),
        "StaticCache": (style.FAINT, "dashed", "v"),
        "VmmCache": style.backend_style("vmm:64KiB"),
        "ContiguousCache": style.backend_style("contiguous:limit"),
        "VmmCache, kvalloc_paged": style.backend_style("vmm:2MiB"),
        "PagedCache": style.backend_style("paged:16"),
        "PagedCache, gathered": style.backend_style("paged:1"),
    }
    values = (
        ("update_us", "update of a layer, µs"),
        ("decode_ms_per_token", "decode step, ms"),
        ("resident_mib", "resident, MiB"),
    )
    with style.applied():
        figure = Figure(figsize=(9.6, 4.0), layout="constrained")
        panels = figure.subplots(1, 3)
        for axes, (key, label) in zip(panels, values, strict=True):
            for name, (color, line, marker) in looks.items():
                mine = [(row["context"], row[key]) for row in rows if row["cache"] == name]
                if not mine:
                    continue
                axes.plot(*zip(*mine, strict=True), color=color, ls=line, marker=marker, ms=4,
                          label=name)  # fmt: skip
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            ticks = sorted({row["context"] for row in rows})
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30)
            if key != "update_us":
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(style.thousands())
            axes.minorticks_off()
            axes.set_xlabel("tokens stored")
            axes.set_ylabel(label)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        first = rows[0]
        style.heading(
            figure,
            f"Caches of transformers models: 2 layers, {first['kv_heads']} KV heads, "
            f"batch {first['batch']}",
        )
        return style.save(figure, out, "bench-cache")


def cache_command(
    context: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens stored. Repeat it (default: 1024, 2048, 4096, 8192)."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = Config.batch,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = Config.kv_heads,
    q_heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = Config.q_heads,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_ROUNDS, help=f"Timed steps per cache (default: {Config.num_rounds})."
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Length that the caches are made for, where memory is told "
            f"(default: {Config.max_length}).",
        ),
    ] = None,
    quick: Quick = False,
    out: Annotated[Path, typer.Option(help="Folder for bench_cache.json and the figure.")] = Path(
        "out"
    ),
    json: JsonFile = None,
) -> None:
    """Time the caches of a transformers model: its own, and ours.

    [cyan]kvalloc bench cache[/cyan] – update, decode step and memory from 1k to 8k tokens

    [cyan]kvalloc bench cache --context 4096 --batch 4 --kv-heads 2 --json -[/cyan]

    [bold]update[/bold]: one layer, one token a row; [bold]decode[/bold]: a forward of a Llama of
    two layers with random weights; [bold]resident[/bold]: what a cache for --max-length tokens
    takes with so many stored. Medians of interleaved steps. [bold]gathered[/bold]: a model whose
    attention does not read pages.
    """
    default = QUICK if quick else Config()
    config = Config(
        contexts=tuple(context or default.contexts),
        batch=batch,
        kv_heads=kv_heads,
        q_heads=q_heads,
        num_rounds=rounds or default.num_rounds,
        max_length=max_length or default.max_length,
    )
    require_folder(out, json)
    with progress_bar("phases", quiet=json == "-") as progress:
        rows = run(config, progress)
    document = bench_result("cache", asdict(config), rows)
    if not keep(document, out / "bench_cache.json", json):
        return
    paths = plot(rows, out)
    show(COLUMNS, rows, "Caches of a transformers model")
    say_where(out, ["bench_cache.json", *(path.name for path in paths)])
