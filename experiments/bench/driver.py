"""What does the driver cost beyond its system calls, alone and in a growth across a page?

Every call is timed beside the bare system calls that it stands for, populating included, in
the same rounds, so that both meet the same machine in the same mood. Both are made from Python.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..commands import MOST_ROUNDS, JsonFile, Quick, keep, progress_bar, require_folder, say_where
from ..errors import BadInput
from ..output import parse_bytes
from ..registry import bench_result
from ..row_tables import Column, Columns, Row, show, size

DEFAULT_PAGES = ("4KiB", "64KiB", "2MiB")
NUM_WARM_UP = 10
COLUMNS: Columns = (
    Column("page", "page_bytes", size),
    Column("call", "op"),
    Column("p50, µs", "us_p50"),
    Column("p99, µs", "us_p99"),
    Column("bare p50, µs", "bare_us_p50"),
    Column("ratio", "ratio"),
)


@dataclass(frozen=True)
class Config:
    """Page sizes, each a multiple of the OS page, and timed rounds of verbs and of growth."""

    page_bytes: tuple[int, ...] = tuple(map(parse_bytes, DEFAULT_PAGES))
    num_rounds: int = 500


QUICK = Config(num_rounds=20)


def register(bench: typer.Typer) -> None:
    """Add the ``driver`` bench."""
    bench.command("driver")(driver_command)


def run(
    config: Config, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Row]:
    """Time every verb of the host driver, and growth of a ``VmmKVCache`` on it.

    Parameters
    ----------
    config
        What to time and how often.
    progress
        Called with rounds done and rounds in all, those that warm up included.

    Returns
    -------
    list of dict
        ``driver, op, page_bytes, rounds, us_p50, us_p99``: microseconds of a call;
        ``bare_us_p50, ratio``: of the bare system calls in its place, and ``us_p50`` over it;
        None where the call makes no system call.

    Raises
    ------
    BadInput
        No rounds, or a page that is no multiple of the OS page.
    DriverError
        Not on Linux.
    """
    from ...vmm.system import OS_PAGE
    from .driver_rounds import Times, grow_rounds, verb_rounds

    if config.num_rounds < 1:
        raise BadInput(f"{config.num_rounds} rounds time nothing: give at least 1")
    for page_bytes in config.page_bytes:
        if page_bytes % OS_PAGE:
            raise BadInput(f"a page of {page_bytes} bytes is not a multiple of {OS_PAGE}")
    rows: list[Row] = []
    num_done, total = 0, 2 * len(config.page_bytes) * (NUM_WARM_UP + config.num_rounds)
    for page_bytes in config.page_bytes:
        for make_rounds in (verb_rounds, grow_rounds):
            timed: list[Times] = []
            with closing(make_rounds(page_bytes)) as rounds:
                for _ in range(NUM_WARM_UP + config.num_rounds):
                    timed.append(next(rounds))
                    num_done += 1
                    progress(num_done, total)
            rows += _rows(page_bytes, timed[NUM_WARM_UP:])
    return rows


def _rows(page_bytes: int, timed: list[Any]) -> list[Row]:
    import numpy as np

    rows: list[Row] = []
    for op in timed[0]:
        p50, p99 = np.percentile([times[op][0] for times in timed], [50, 99]) / 1e3
        bare = None
        if timed[0][op][1] is not None:
            bare = float(np.median([times[op][1] for times in timed])) / 1e3
        rows.append(
            {
                "driver": "host",
                "op": op,
                "page_bytes": page_bytes,
                "rounds": len(timed),
                "us_p50": float(p50),
                "us_p99": float(p99),
                "bare_us_p50": bare,
                "ratio": float(p50) / bare if bare else None,
            }
        )
    return rows


def driver_command(
    page: Annotated[
        list[str] | None,
        typer.Option("--page", metavar="SIZE", help="Repeat it (default: 4KiB, 64KiB, 2MiB)."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_ROUNDS, help=f"Timed rounds per page (default: {Config.num_rounds})."
        ),
    ] = None,
    quick: Quick = False,
    out: Annotated[Path, typer.Option(help="Folder for bench_driver.json.")] = Path("out"),
    json: JsonFile = None,
) -> None:
    """Time the memory driver of the mapped backend beside the bare system calls.

    [cyan]kvalloc bench driver[/cyan] – the verbs, and a growth across a page, on this machine

    [cyan]kvalloc bench driver --page 2MiB --rounds 2000 --json -[/cyan]

    [bold]grow[/bold] takes one new page for K and one for V; [bold]pooled[/bold]: pages created
    before; [bold]warm[/bold]: still mapped from a finished sequence; [bold]inside[/bold]: no
    page needed. [bold]ratio[/bold]: over the bare system calls.
    """
    require_folder(out, json)
    default = QUICK if quick else Config()
    config = Config(
        tuple(parse_bytes(size) for size in page or DEFAULT_PAGES), rounds or default.num_rounds
    )
    with progress_bar("rounds", quiet=json == "-") as progress:
        rows = run(config, progress)
    result = bench_result("driver", asdict(config), rows)
    if keep(result, out / "bench_driver.json", json):
        show(COLUMNS, rows, "Host driver")
        say_where(out, ["bench_driver.json"])
