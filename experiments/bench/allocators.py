"""What does the bookkeeping cost a token, the scheduler's loop included?

The canonical trace: 10,000 requests at once, prompts of 500 to 1,500 tokens, outputs of 100 to
300, on 8,192 pages of 16 tokens, at most 128 running; a sequence that cannot grow preempts the
youngest, which starts again. Each backend runs in a process of its own, so that its peak of
resident memory is its own.

Refuted if the books of pages or of mapped pages took more than 0.30 µs per token-step.
"""

from __future__ import annotations

import json as json_module
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import typer

from ..commands import MOST_ROUNDS, JsonFile, Quick, keep, progress_bar, require_folder, say_where
from ..errors import BadInput
from ..registry import bench_result
from ..row_tables import Column, Columns, Row
from ..saturated import drain
from ..scheduling import Counts

PAGE_TOKENS = 16
NUM_SLOTS = 8_192 * PAGE_TOKENS
MAX_RUNNING = 128
DEFAULT_BACKENDS = ("paged:16", "vmm:16", "contiguous:max", "contiguous:pow2")
COLUMNS: Columns = (
    Column("backend", "backend"),
    Column("µs per token-step", "us_per_token_step"),
    Column("requests/s", "requests_per_s"),
    Column("peak RSS, MiB", "peak_rss_mib"),
)


@dataclass(frozen=True)
class Config:
    """Backends by SPEC (pages count tokens), requests of the trace, and timed repetitions."""

    backends: tuple[str, ...] = DEFAULT_BACKENDS
    requests: int = 10_000
    repeats: int = 5


QUICK = Config(requests=200, repeats=1)


def register(bench: typer.Typer) -> None:
    """Add the ``allocators`` bench."""
    bench.command("allocators")(allocators_command)


def run(
    config: Config, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Row]:
    """Time each backend in a fresh process; the median of the repetitions.

    Returns
    -------
    list of dict
        ``backend, us_per_token_step, requests_per_s, peak_rss_mib``. A token-step is one token
        produced; memory is the peak of the whole process, interpreter and trace included.

    Raises
    ------
    BadInput
        A backend that does not exist, no repetition, or too many requests.
    """
    from ..generators import check_requests
    from ..specs import parse_spec

    if config.repeats < 1:
        raise BadInput(f"{config.repeats} repetitions time nothing: give at least 1")
    check_requests(config.requests)
    for spec in config.backends:
        parse_spec(spec, slots=True)
    rows = []
    for done, spec in enumerate(config.backends):
        progress(done, len(config.backends))
        rows.append(_in_a_process(spec, config))
    progress(len(config.backends), len(config.backends))
    return rows


def _in_a_process(spec: str, config: Config) -> Row:
    command = [sys.executable, "-m", __name__, spec, str(config.requests), str(config.repeats)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines() or ["no reason given"]
        raise BadInput(f"{spec}: the process that times it failed: {reason[-1]}")
    row: Row = json_module.loads(done.stdout)
    return row


def time_one(spec: str, requests: int, repeats: int) -> Row:
    """Time a backend in this process."""
    seconds, tokens = [], 0
    for _ in range(repeats):
        took, counts = replay_canonical(spec, requests)
        seconds.append(took)
        tokens = counts.tokens
    return {
        "backend": spec,
        "us_per_token_step": median(seconds) / tokens * 1e6,
        "requests_per_s": requests / median(seconds),
        "peak_rss_mib": peak_rss_mib(),
    }


def replay_canonical(spec: str, requests: int) -> tuple[float, Counts]:
    """Seconds and counts of the canonical trace on a fresh allocator."""
    from ..generators import generate
    from ..specs import parse_spec, token_geometry

    trace = generate("canonical", requests=requests).with_max_new(None)
    geometry, memory = token_geometry(NUM_SLOTS)
    allocator = parse_spec(spec, slots=True).allocator(geometry, memory)
    start = perf_counter()
    counts = Counts()
    for scheduler in drain(trace, allocator, max_running=MAX_RUNNING):
        counts = scheduler.counts
    took = perf_counter() - start
    assert counts.completed == requests, "the trace did not drain"
    return took, counts


def peak_rss_mib() -> float | None:
    """Peak of resident memory of this process; None where the system does not say.

    Not ``ru_maxrss``: a child inherits the peak of the process that started it.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0][1]) / 1024 if lines else None


def allocators_command(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            "-b",
            metavar="SPEC",
            help=f"Pages count tokens. Repeat it (default: {', '.join(DEFAULT_BACKENDS)}).",
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help=f"Of the trace (default: {Config.requests}).")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_ROUNDS, help=f"Runs, of which the median (default: {Config.repeats})."
        ),
    ] = None,
    quick: Quick = False,
    out: Annotated[Path, typer.Option(help="Folder for bench_allocators.json.")] = Path("out"),
    json: JsonFile = None,
) -> None:
    """Time the bookkeeping of each backend, the scheduler's loop included.

    [cyan]kvalloc bench allocators[/cyan] – 10,000 requests, about 2 million tokens

    [cyan]kvalloc bench allocators -b paged:16 -b vmm:16 --json -[/cyan]
    """
    default = QUICK if quick else Config()
    config = Config(
        tuple(backend or default.backends), requests or default.requests, repeats or default.repeats
    )
    require_folder(out, json)
    with progress_bar("backends", quiet=json == "-") as progress:
        rows = run(config, progress)
    document = bench_result("allocators", asdict(config), rows)
    if keep(document, out / "bench_allocators.json", json):
        from ..row_tables import show

        show(COLUMNS, rows, "Bookkeeping, canonical trace")
        say_where(out, ["bench_allocators.json"])


if __name__ == "__main__":
    _, one, num_requests, num_repeats = sys.argv
    print(json_module.dumps(time_one(one, int(num_requests), int(num_repeats))))
