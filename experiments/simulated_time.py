"""A replay whose clock is a model: exact books, simulated seconds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from ..contract import Allocator
from .scheduler import Scheduler
from .scheduling import Counts, OnFailure, OnFull, Placed
from .step_model import StepModel
from .trace import Trace

Floats = npt.NDArray[np.float64]


@dataclass
class Timed:
    """When each request got its first and its last token, in simulated seconds.

    Attributes
    ----------
    arrival, first, finish : numpy.ndarray
        float64 ``[N]``; NaN where it never came to that.
    output : numpy.ndarray
        int64 ``[N]`` tokens produced by requests that finished.
    end : float
        When the last request was done with.
    """

    arrival: Floats
    first: Floats
    finish: Floats
    output: npt.NDArray[np.int64]
    counts: Counts
    end: float

    def tpot_s(self) -> Floats:
        """Mean seconds between tokens of each request; 0 for one token."""
        between = np.maximum(self.output - 1, 1)
        tpot: Floats = (self.finish - self.first) / between
        return tpot


def simulate(
    trace: Trace,
    allocator: Allocator,
    model: StepModel,
    pcie_bytes_per_s: float,
    *,
    on_full: OnFull = "queue",
    on_failure: OnFailure = "recompute",
) -> Timed:
    """Serve a trace that arrives in seconds; a step takes as long as the model says.

    What arrived by the end of a step takes part in the next. Swapped tokens cross PCIe twice,
    booked in the step that brings them back.
    """
    num = len(trace)
    computed: list[int] = []
    fresh: list[int] = []

    def prefill(placed: list[Placed]) -> None:
        computed.extend(tokens - cached for _, tokens, cached in placed)
        fresh.extend(request for request, _, _ in placed)

    scheduler = Scheduler(
        allocator,
        trace.prompt,
        trace.output,
        trace.max_new,
        on_full=on_full,
        on_failure=on_failure,
        prefill=prefill,
    )
    counts = scheduler.counts
    arrival: Floats = np.asarray(trace.arrival, np.float64)
    first, finish = np.full(num, np.nan), np.full(num, np.nan)
    now, arrived, alive = 0.0, 0, set[int]()
    while arrived < num or scheduler.active or scheduler.waiting:
        if not scheduler.active and not scheduler.waiting:
            now = max(now, float(arrival[arrived]))
        due = int(np.searchsorted(arrival, now, side="right"))
        computed.clear()
        fresh.clear()
        tokens, swapped = counts.tokens, counts.swapped_tokens
        scheduler.step(range(arrived, due))
        arrived = due
        now += model.step_s(counts.tokens - tokens, allocator.usage().live, tuple(computed))
        moved = (counts.swapped_tokens - swapped) * allocator.geometry.bytes_per_token
        now += 2 * moved / pcie_bytes_per_s
        for request in fresh:
            if np.isnan(first[request]):
                first[request] = now
        gone = alive.union(fresh) - _still_here(scheduler, first)
        if on_failure == "drop":
            gone -= {request for request, _ in scheduler.refusals}
        finish[list(gone)] = now
        alive = _still_here(scheduler, first)
    return Timed(arrival, first, finish, trace.output, counts, now)


def _still_here(scheduler: Scheduler, first: Floats) -> set[int]:
    """Requests that began and have not left; preempted ones wait before all newcomers."""
    away = takewhile(lambda request: not np.isnan(first[request]), scheduler.waiting)
    return {*scheduler.active, *away}
