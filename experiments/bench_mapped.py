"""``kvalloc bench mapped``: does dense attention notice that its memory is mapped page by page?

The same stock kernel reads the same numbers with the same strides, through a mapped cache's view,
from an ordinary tensor, and from a second ordinary tensor, which tells how far apart equals are.
They take turns, and the order within a turn rotates.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..contract import Seq
from ..geometry import KVGeometry
from .environment import environment
from .output import emit_json
from .registry import load_average
from .row_tables import Column, Columns, show, terminal_table

if TYPE_CHECKING:
    from ..vmm import VmmKVCache

Row = dict[str, Any]
COLUMNS: Columns = (
    Column("layout", "layout"),
    Column("batch", "batch"),
    Column("context", "context"),
    Column("plain ms", "plain_ms"),
    Column("mapped ms", "mapped_ms"),
    Column("mapped / plain", "ratio"),
    Column("plain / plain", "control"),
)


@dataclass(frozen=True)
class Config:
    """Shapes (batch, context), turns, and pages of the mapped cache.

    Which physical pages a tensor got decides some per cent of its time, so the turns are divided
    among ``fresh`` caches and tensors.
    """

    shapes: tuple[tuple[int, int], ...] = ((8, 4_096), (2, 16_384))
    layouts: tuple[str, ...] = ("token-major", "head-major")
    fresh: int = 7
    turns: int = 9
    page_bytes: int = 2 << 20
    kv_heads: int = 8
    head_dim: int = 128
    q_heads: int = 32


CONFIG = Config()
QUICK = Config(
    shapes=((2, 64),), fresh=2, turns=2, page_bytes=64 << 10, kv_heads=2, head_dim=16, q_heads=4
)


def register(bench: typer.Typer) -> None:
    """Add the ``mapped`` bench."""
    bench.command("mapped")(mapped_command)


def run(config: Config) -> list[Row]:
    """One row per layout and shape."""
    return [
        _measure(config, layout, batch, context)
        for layout in config.layouts
        for batch, context in config.shapes
    ]


def _measure(config: Config, layout: str, batch: int, context: int) -> Row:
    from ..vmm import VmmKVCache

    geometry = KVGeometry.uniform(
        "bench",
        layers=1,
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype="float32",
        max_context=context,
    )
    buffers = 2 * config.kv_heads if layout == "head-major" else 2
    per_buffer = -(-context * geometry.bytes_per_token // buffers // config.page_bytes)
    memory = batch * buffers * per_buffer * config.page_bytes
    times: list[list[float]] = [[], [], []]
    for _ in range(config.fresh):
        with VmmKVCache(geometry, memory, config.page_bytes, layout=layout) as cache:
            for all_times, new in zip(
                times, _take_turns(config, cache, batch, context), strict=True
            ):
                all_times += new
    mapped, plain, again = times
    return {
        "layout": layout,
        "batch": batch,
        "context": context,
        "plain_ms": 1e3 * median(plain),
        "mapped_ms": 1e3 * median(mapped),
        "ratio": median(m / p for m, p in zip(mapped, plain, strict=True)),
        "control": median(a / p for a, p in zip(again, plain, strict=True)),
    }


def _take_turns(config: Config, cache: VmmKVCache, batch: int, context: int) -> list[list[float]]:
    """Seconds per call: mapped, plain, and plain again. All views end with this function."""
    import torch

    from ..contract import DenseView
    from ..kernels.attention import attend

    seqs: list[Seq] = list(range(batch))
    for seq in seqs:
        cache.admit(seq, context)
        kv = torch.randn(2, context, config.kv_heads, config.head_dim)
        cache.write(0, [seq], kv[0], kv[1], lens=[context])
    view = cache.view(0, seqs)
    num_rows = int(view.starts.max()) + context

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty_strided((num_rows, *tensor.shape[1:]), tensor.stride())
        for start in view.starts.tolist():
            copy[start : start + context] = tensor[start : start + context]
        return copy

    views = [view] + [
        DenseView(copied(view.k), copied(view.v), view.starts, view.lengths) for _ in range(2)
    ]
    q = torch.randn(batch, config.q_heads, config.head_dim)
    assert torch.equal(attend(q, view), attend(q, views[1])), "the two differ"
    times: list[list[float]] = [[], [], []]
    for turn in range(config.turns):
        for n in range(3):
            which = (turn + n) % 3
            begin = perf_counter()
            attend(q, views[which])
            times[which].append(perf_counter() - begin)
    return times


def mapped_command(
    out: Annotated[Path | None, typer.Option(help="Folder for bench_mapped.json.")] = None,
    json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="JSON to a file, or only to -.")
    ] = None,
) -> None:
    """Time dense attention over mapped pages beside an ordinary tensor of equal strides."""
    rows = run(CONFIG)
    result = {
        "schema": 1,
        "experiment": "bench_mapped",
        "environment": environment(),
        "load_average": load_average(),
        "settings": asdict(CONFIG),
        "rows": rows,
    }
    if out is not None:
        emit_json(result, str(out / "bench_mapped.json"))
    if json is not None:
        emit_json(result, json)
    if json != "-":
        title = "Dense attention over mapped pages, beside an ordinary tensor"
        show(terminal_table(COLUMNS, rows, title))
