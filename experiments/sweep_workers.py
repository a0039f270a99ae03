"""Who computes the cells of a sweep: this machine's cores through joblib, or a Dask cluster."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from joblib import Parallel, delayed, parallel_config

from .errors import BadInput
from .row_tables import Row
from .sweep import Cell, compute
from .trace import Trace


def computed(
    work: list[tuple[Cell, Trace]], jobs: int, cluster: str | None
) -> Iterator[tuple[Cell, Row]]:
    """Cells and their rows, in the order in which they are finished."""
    with ExitStack() as stack:
        if cluster is None:
            stack.enter_context(parallel_config(backend="loky", n_jobs=jobs))
        else:
            stack.enter_context(_client(cluster))
            stack.enter_context(parallel_config(backend="dask"))
        with _deaf_to_interrupts():  # the call starts the workers
            rows: Any = Parallel(return_as="generator_unordered")(
                delayed(_with_cell)(cell, trace) for cell, trace in work
            )
        yield from rows


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes started here never hear Ctrl-C: we do, and end them, without their tracebacks."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _with_cell(cell: Cell, trace: Trace) -> tuple[Cell, Row]:
    return cell, compute(cell, trace)


def _client(address: str) -> Any:
    import distributed

    client: Any = distributed.Client  # without types
    try:
        return client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise BadInput(f"no Dask scheduler answers at {address}: {error}") from error
