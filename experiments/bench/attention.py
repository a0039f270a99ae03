"""How fast is each attention kernel, and how near to what the memory can deliver?

Decode, one query per sequence: at a fixed amount of KV data over the block size, and over the
context (long contexts in small batches). Kernels, a copy, and a plain read of as many bytes take
turns in every round, so that all meet the same machine in the same mood; medians are reported.
Outputs are compared with float64 and poisoned after use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...geometry import canonical_dtype
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
from ..row_tables import Column, Columns, Row, percent, show

if TYPE_CHECKING:
    from .attention_points import Point

COLUMNS: Columns = (
    Column("kernel", "kernel"),
    Column("layout", "layout"),
    Column("block", "page_size"),
    Column("batch", "batch"),
    Column("context", "context"),
    Column("ms", "ms"),
    Column("GB/s", "gbps"),
    Column("of read", "of_read_bandwidth", percent),
    Column("of copy", "of_copy_bandwidth", percent),
    Column("× dense", "vs_dense"),
)


@dataclass(frozen=True)
class Config:
    """Block sizes at one context, contexts at one block size; ``tokens`` in every batch."""

    page_sizes: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    page_size: int = 16
    context: int = 4096
    tokens: int = 32768
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "float32"
    device: str = "cpu"
    rounds: int = 15
    seed: int = 0
    min_bytes: int = 64 << 20
    """K and V together must exceed the caches."""


QUICK = Config(page_sizes=(16, 256), contexts=(1024,), context=2048, tokens=16384, rounds=3)
"""A small form, seconds long, to see that it works."""


def register(bench: typer.Typer) -> None:
    """Add the ``attention`` bench."""
    bench.command("attention")(attention_command)


def points(config: Config) -> list[Point]:
    """Block size and context of each group of rows, in the order of the rows."""
    from .attention_points import Point

    pairs = [(size, config.context) for size in config.page_sizes]
    pairs += [(config.page_size, context) for context in config.contexts]
    return [Point(size, n, config.tokens // n) for size, n in dict.fromkeys(pairs)]


def run(
    config: Config, progress: Callable[[int, int], None] = lambda num_done, num_total: None
) -> list[Row]:
    """Time every kernel that the device has, on both layouts.

    Returns
    -------
    list of dict
        ``kernel, layout, page_size, batch, context, q_heads, kv_heads, head_dim, dtype``;
        ``ms``: median of ``rounds``; ``gbps``: bytes of K and V over that time;
        ``of_copy_bandwidth``, ``of_read_bandwidth``: that over what a copy (read and written
        bytes) and a plain sum over as much memory reach here; ``vs_dense``: ``ms`` over that of
        the best dense kernel of the same point, None without one; ``error``: against float64.

    Raises
    ------
    BadInput
        Data that fit into the caches, or a count that leaves nothing to time.
    RuntimeError
        A kernel is wrong.
    """
    from .attention_points import candidates
    from .attention_rounds import measure

    _check(config)
    rows: list[Row] = []
    groups = points(config)
    for i, point in enumerate(groups):
        progress(i, len(groups))
        kernels, limits = candidates(config, point)
        rows += measure(config, point, kernels, limits)
    progress(len(groups), len(groups))
    return rows


def _check(config: Config) -> None:
    from .attention_points import TOLERANCE
    from .attention_rounds import kv_bytes

    if config.dtype not in TOLERANCE:
        raise BadInput(f"dtype {config.dtype!r} has no kernel: choose from {', '.join(TOLERANCE)}")
    if config.rounds < 1:
        raise BadInput(f"{config.rounds} rounds time nothing: give at least 1")
    for size in (*config.page_sizes, config.page_size):
        if size < 1:
            raise BadInput(f"a block of {size} tokens holds nothing: give at least 1")
    for context in (*config.contexts, config.context):
        if not 1 <= context <= config.tokens:
            raise BadInput(f"a context of {context} is not within the {config.tokens} tokens")
    if kv_bytes(config) < config.min_bytes:
        raise BadInput(f"{kv_bytes(config):,} bytes of K and V fit into caches: give more tokens")
    if config.device == "cpu":
        _check_memory(config)
    else:
        import torch

        if config.device != "cuda" or not torch.cuda.is_available():
            raise BadInput(f"device {config.device!r} is not here: choose cpu, or cuda with a GPU")


def _check_memory(config: Config) -> None:
    """For the tokens, a copy of them, and both layouts of whole rows and of whole blocks."""
    from .attention_rounds import kv_bytes

    in_blocks = max(
        point.batch * -(-point.context // point.page_size) * point.page_size
        for point in points(config)
    )
    needed = kv_bytes(config) * (4 * config.tokens + 2 * in_blocks) // config.tokens
    check_memory(needed, "give fewer --tokens or smaller blocks")


def attention_command(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="Of K and V: float32 on cpu, bfloat16 on cuda.")
    ] = None,
    page_size: Annotated[
        list[int] | None,
        typer.Option("--block", metavar="TOKENS", help="Repeat it (default: 1, 8, 16, … 256)."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help=f"Tokens in every batch (default: {Config.tokens}).")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_ROUNDS, help=f"Timed rounds (default: {Config.rounds})."),
    ] = None,
    quick: Quick = False,
    out: Annotated[
        Path, typer.Option(help="Folder for bench_attention.json and the figure.")
    ] = Path("out"),
    json: JsonFile = None,
) -> None:
    """Time the attention kernels: stock dense ones, our paged one, and peers.

    [cyan]kvalloc bench attention[/cyan] – over block sizes and contexts, minutes long

    [cyan]kvalloc bench attention --quick[/cyan] – seconds, to see that it works

    [cyan]kvalloc bench attention --device cuda --dtype bfloat16 --json -[/cyan]

    [bold]of read[/bold]: bytes of K and V per second over those of a plain sum;
    [bold]of copy[/bold]: over those that a copy reads and writes; [bold]× dense[/bold]: time
    over that of the best stock dense kernel of the same batch.
    """
    default = QUICK if quick else Config()
    tokens = default.tokens if tokens is None else tokens
    config = replace(
        default,
        page_sizes=tuple(page_size or default.page_sizes),
        contexts=tuple(n for n in default.contexts if n <= tokens),
        tokens=tokens,
        device=device,
        dtype=_dtype(dtype or ("float32" if device == "cpu" else "bfloat16")),
        rounds=rounds or default.rounds,
    )
    require_folder(out, json)
    with progress_bar("points", quiet=json == "-") as progress:
        rows = run(config, progress)
    document = bench_result("attention", asdict(config), rows)
    if keep(document, out / "bench_attention.json", json):
        from .attention_figure import plot

        paths = plot(rows, out)
        show(COLUMNS, rows, "Decode attention, one query per sequence")
        say_where(out, ["bench_attention.json", *(path.name for path in paths)])


def _dtype(name: str) -> str:
    try:
        return canonical_dtype(name)
    except ValueError as error:
        raise BadInput(str(error)) from error
