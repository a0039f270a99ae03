"""``kvalloc bench mapped``: does dense attention notice that its memory is mapped page by page?

The same stock kernel reads the same numbers with the same strides, through a mapped cache's view
and from several ordinary tensors, which also tell how far apart equals are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Annotated

import typer

from ..commands import JsonFile, Quick, keep, progress_bar, require_folder, say_where
from ..registry import bench_result
from ..row_tables import Column, Columns, Row, show

COLUMNS: Columns = (
    Column("layout", "layout"),
    Column("batch", "batch"),
    Column("context", "context"),
    Column("plain ms", "plain_ms"),
    Column("mapped ms", "mapped_ms"),
    Column("mapped / plain", "ratio"),
    Column("lower quartile", "ratio_low"),
    Column("upper quartile", "ratio_high"),
    Column("slowest / fastest plain", "spread"),
)


@dataclass(frozen=True)
class Config:
    """Shapes (batch, context), and how often.

    ``fresh`` rounds make a cache and ``plains`` ordinary tensors anew, in random order, and read
    each ``turns`` times.
    """

    shapes: tuple[tuple[int, int], ...] = ((8, 4_096), (2, 16_384))
    layouts: tuple[str, ...] = ("token-major", "head-major")
    fresh: int = 12
    plains: int = 4
    turns: int = 7
    page_bytes: int = 2 << 20
    kv_heads: int = 8
    head_dim: int = 128
    q_heads: int = 32
    seed: int = 0


CONFIG = Config()
QUICK = Config(
    shapes=((2, 64),),
    fresh=2,
    plains=2,
    turns=2,
    page_bytes=64 << 10,
    kv_heads=2,
    head_dim=16,
    q_heads=4,
)


def register(bench: typer.Typer) -> None:
    """Add the ``mapped`` bench."""
    bench.command("mapped")(mapped_command)


def run(
    config: Config, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Row]:
    """One row per layout and shape.

    Returns
    -------
    list of dict
        ``layout, batch, context``; ``plain_ms, mapped_ms``: medians over the rounds;
        ``ratio``: median over the rounds of mapped over the mean of the ordinary tensors of its
        round, ``ratio_low`` and ``ratio_high`` its quartiles; ``spread``: median over the rounds
        of the slowest ordinary tensor over the fastest.
    """
    from .mapped_rounds import Shape, rounds

    cases = [(layout, *shape) for layout in config.layouts for shape in config.shapes]
    rows: list[Row] = []
    for layout, batch, context in cases:
        shape = Shape(
            layout,
            batch,
            context,
            config.page_bytes,
            config.kv_heads,
            config.head_dim,
            config.q_heads,
        )
        timed = []
        for times in islice(rounds(shape, config.plains, config.turns, config.seed), config.fresh):
            timed.append(times)
            progress(len(rows) * config.fresh + len(timed), len(cases) * config.fresh)
        rows.append({"layout": layout, "batch": batch, "context": context, **_summary(timed)})
    return rows


def _summary(timed: list[list[float]]) -> Row:
    """What the rounds say: mapped seconds first in each, then those of ordinary tensors."""
    low, ratio, high = quantiles(
        (mapped / mean(plain) for mapped, *plain in timed), n=4, method="inclusive"
    )
    return {
        "plain_ms": 1e3 * median(mean(plain) for _, *plain in timed),
        "mapped_ms": 1e3 * median(mapped for mapped, *_ in timed),
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "spread": median(max(plain) / min(plain) for _, *plain in timed),
    }


def mapped_command(
    quick: Quick = False,
    out: Annotated[Path, typer.Option(help="Folder for bench_mapped.json.")] = Path("out"),
    json: JsonFile = None,
) -> None:
    """Time dense attention over mapped pages beside ordinary tensors of equal strides.

    [cyan]kvalloc bench mapped[/cyan] – two shapes in two layouts, some minutes

    [cyan]kvalloc bench mapped --json -[/cyan]

    [bold]mapped / plain[/bold]: over the mean of ordinary tensors made in the same round, median
    and quartiles of the rounds; [bold]slowest / fastest plain[/bold]: how far apart ordinary
    tensors are that differ in nothing but their physical pages.
    """
    require_folder(out, json)
    config = QUICK if quick else CONFIG
    with progress_bar("rounds", quiet=json == "-") as progress:
        rows = run(config, progress)
    result = bench_result("mapped", asdict(config), rows)
    if keep(result, out / "bench_mapped.json", json):
        title = "Dense attention over mapped pages, beside ordinary tensors"
        show(COLUMNS, rows, title)
        say_where(out, ["bench_mapped.json"])
