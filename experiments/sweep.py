"""Many replays of the books at once: cells of a grid, computed on all cores, each exactly once.

A cell's result is a file named by a hash of everything that it depends on, written whole by the
process that asked for it. Whoever starts the same sweep again finds it; an interrupted sweep
leaves finished cells and nothing else, and workers need no disk in common.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path

from .compare import Settings, compare
from .errors import BadInput
from .output import parse_bytes, to_json, write_atomic
from .readers import read_trace
from .row_tables import Row
from .scheduling import OnFailure
from .specs import chosen_model, parse_spec
from .trace import Trace

LEFT_OUT = ("series", "owners", "seconds", "allocate_us", "attend_ms", "tpot_ms", "max_abs_error")
CODE = ("*.py", "contiguous/*.py", "pages/*.py", "paged/*.py", "vmm/*.py", "experiments/**/*.py")
"""What a row can depend on."""


@dataclass(frozen=True)
class Cell:
    """One replay: everything that its numbers depend on, in words of the command line."""

    trace: str
    backend: str
    model: str
    memory: str
    on_failure: OnFailure = "recompute"
    limit: int | None = None
    step_ms: float = 25.0
    seed: int = 0

    def key(self) -> str:
        """Name of the cell's file: changes with the cell, a trace file's content, our code."""
        path = Path(self.trace)
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        told = [asdict(self), content, _code()]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:20]


@cache
def _code() -> str:
    """Hash of the code that makes a row: who changes an allocator sweeps anew."""
    package = Path(__file__).parents[1]
    told = hashlib.sha256()
    for pattern in CODE:
        for path in sorted(package.glob(pattern)):
            told.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return told.hexdigest()


def grid(
    traces: Iterable[str],
    backends: Iterable[str],
    model: str,
    memories: Iterable[str],
    *,
    pages: Iterable[str] = (),
    policies: Iterable[str] = (),
    on_failures: Iterable[OnFailure] = ("recompute",),
    limit: int | None = None,
    seed: int = 0,
) -> list[Cell]:
    """Every combination, checked.

    ``paged`` and ``vmm`` alone take each of ``pages`` (those that are bare numbers are tokens
    and for ``paged``, those with a unit are bytes and for ``vmm``), ``contiguous`` alone each of
    ``policies``; a whole SPEC stands for itself.

    Raises
    ------
    BadInput
        A trace, backend, model or size that does not exist, a page or policy that none of the
        backends takes, or an empty grid.
    """
    specs = list(dict.fromkeys(_expanded(list(backends), list(pages), list(policies))))
    for spec in specs:
        parse_spec(spec, slots=False)
    chosen_model(model)
    memories = list(memories)
    for memory in memories:
        parse_bytes(memory)
    cells = [
        Cell(trace, spec, model, memory, on_failure, limit, seed=seed)
        for trace, spec, memory, on_failure in product(traces, specs, memories, on_failures)
    ]
    if not cells:
        raise BadInput("nothing to sweep: name at least one trace, backend and memory size")
    return cells


def _expanded(backends: list[str], pages: list[str], policies: list[str]) -> Iterator[str]:
    choices = {
        "paged": [page for page in pages if page.isdecimal()],
        "vmm": [page for page in pages if not page.isdecimal()],
        "contiguous": policies,
    }
    options = {"paged": "--page", "vmm": "--page", "contiguous": "--policy"}
    for family, given in choices.items():
        if given and family not in backends:
            raise BadInput(
                f"{options[family]} {given[0]} is for {family} alone, which is not in the sweep: "
                f"add -b {family}, or leave it out"
            )
    for backend in backends:
        if backend not in choices or (backend == "vmm" and not choices["vmm"]):
            yield backend  # whole, or wrong: the reader of SPECs tells
        elif not choices[backend]:
            what = "--policy NAME" if backend == "contiguous" else "--page TOKENS"
            raise BadInput(f"{backend} alone needs {what}, or write a whole SPEC")
        else:
            yield from (f"{backend}:{choice}" for choice in choices[backend])


def compute(cell: Cell, trace: Trace) -> Row:
    """Replay one cell; a cell that cannot be has ``error`` instead of numbers."""
    model = chosen_model(cell.model)
    settings = Settings(
        (parse_spec(cell.backend, slots=False),),
        model,
        parse_bytes(cell.memory),
        run=False,
        on_failure=cell.on_failure,
        step_ms=cell.step_ms,
        seed=cell.seed,
    )
    try:
        outcome = compare(trace.with_max_new(None, limit=model.max_context), settings)
    except BadInput as error:
        return {**asdict(cell), "error": str(error)}
    backend = outcome["backends"][0]
    for name in (*LEFT_OUT, "spec"):
        del backend[name]
    return {**asdict(cell), "error": None, **backend}


def sweep(
    cells: list[Cell],
    folder: Path,
    *,
    jobs: int = -1,
    cluster: str | None = None,
    progress: Callable[[int, int], None] = lambda num_done, num_total: None,
) -> tuple[list[Row], int]:
    """Rows of all cells in order, and how many of them were computed now.

    Parameters
    ----------
    folder
        Where the cells' files lie.
    jobs
        Processes; −1 takes all cores.
    cluster
        Address of a Dask scheduler, ``tcp://host:port``, whose workers compute instead.
    progress
        Called with cells done and cells in all.
    """
    paths = {cell: folder / "cells" / f"{cell.key()}.json" for cell in cells}
    rows = {cell: _finished(path) for cell, path in paths.items()}
    missing = [cell for cell, row in rows.items() if row is None]
    traces = {name: _trace(cell) for cell in missing if (name := _source(cell))}
    done = len(paths) - len(missing)
    progress(done, len(paths))
    work = [(cell, traces[_source(cell)]) for cell in missing]
    for cell, row in _computed(work, jobs, cluster):
        write_atomic(paths[cell], to_json(row))
        done += 1
        progress(done, len(paths))
    for cell in missing:
        rows[cell] = json.loads(paths[cell].read_text())
    return [rows[cell] or {} for cell in cells], len(missing)


def _finished(path: Path) -> Row | None:
    """The row that an earlier sweep left; None where there is none, or it is damaged."""
    try:
        row = json.loads(path.read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and "error" in row else None


def _source(cell: Cell) -> tuple[str, int | None, int]:
    return cell.trace, cell.limit, cell.seed


def _trace(cell: Cell) -> Trace:
    trace = read_trace(cell.trace, seed=cell.seed)
    return trace if cell.limit is None else trace.head(cell.limit)


def _computed(
    work: list[tuple[Cell, Trace]], jobs: int, cluster: str | None
) -> Iterator[tuple[Cell, Row]]:
    """Cells and their rows as they come in."""
    if not work:
        return
    try:
        from .sweep_workers import computed
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{error.name} is not installed: pip install 'kvalloc[sweep]' brings it"
        ) from error
    yield from computed(work, jobs, cluster)
