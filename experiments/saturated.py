"""More requests than fit: all arrive at once, and memory is sampled while some of them wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..contract import Allocator, Usage
from .errors import BadInput
from .scheduler import Scheduler
from .scheduling import Counts
from .trace import Trace


def drain(
    trace: Trace, allocator: Allocator, *, max_running: int | None = None
) -> Iterator[Scheduler]:
    """Serve a trace whose arrivals are all at once; yields the scheduler after each step."""
    scheduler = Scheduler(
        allocator, trace.prompt, trace.output, trace.max_new, max_running=max_running
    )
    scheduler.step(range(len(trace)))
    yield scheduler
    while scheduler.active or scheduler.waiting:
        scheduler.step(range(0))
        yield scheduler


class Shares:
    """Where the bytes are, averaged over the steps in which a request waited for memory.

    Waste is split by hindsight, sequence by sequence: what it will still fill of what it holds,
    be that a reservation or the rest of a page, and what it never will.
    """

    def __init__(self, trace: Trace, allocator: Allocator) -> None:
        self.num_steps = 0
        self._allocator = allocator
        self._totals = trace.prompt + trace.output
        self._held: dict[tuple[str, int], int] = {}
        self._sums: npt.NDArray[np.float64] = np.zeros(5)

    def sample(self, scheduler: Scheduler) -> None:
        """Book a step, if a request waits and one runs."""
        if not (scheduler.waiting and scheduler.active):
            return
        usage, active = self._allocator.usage(), scheduler.active
        token_bytes = self._allocator.geometry.bytes_per_token
        lengths = [self._allocator.length(request) for request in active]
        held = np.array([self._bytes_held(*of, usage) for of in zip(active, lengths, strict=True)])
        assert held.sum() == usage.reserved, "sequences that share hold less than their sum"
        stored = token_bytes * np.array(lengths)
        to_come = token_bytes * self._totals[active] - stored
        later = int(np.minimum(held - stored, to_come).sum())
        parts = (usage.live, later, usage.waste - later, usage.free)
        self._sums += [*(part / usage.capacity for part in parts), len(scheduler.active)]
        self.num_steps += 1

    def _bytes_held(self, request: int, length: int, usage: Usage) -> int:
        """Reservations hang on the request, pages and exact intervals on the length alone."""
        key = ("request", request) if usage.reservation else ("length", length)
        if key not in self._held:
            self._held[key] = sum(stop - start for start, stop in self._allocator.spans(request))
        return self._held[key]

    def mean(self) -> dict[str, float]:
        """``tokens, later, never, free`` as shares of the memory, and ``running`` requests.

        Raises
        ------
        BadInput
            No request ever waited.
        """
        if not self.num_steps:
            raise BadInput("no request had to wait: give less memory or more requests")
        live, later, never, free, running = (self._sums / self.num_steps).tolist()
        return {"tokens": live, "later": later, "never": never, "free": free, "running": running}


class Saturated(NamedTuple):
    """What a saturated run left behind.

    Attributes
    ----------
    shares : dict
        As ``Shares.mean`` gives them.
    table_bytes : int
        Peak size of the tables that a kernel reads.
    """

    shares: dict[str, float]
    counts: Counts
    num_steps: int
    table_bytes: int


def serve(trace: Trace, allocator: Allocator) -> Saturated:
    """Serve a trace whose arrivals are all at once, and average where the bytes are."""
    shares, counts, num_steps, table_bytes = Shares(trace, allocator), Counts(), 0, 0
    for scheduler in drain(trace, allocator):
        shares.sample(scheduler)
        num_steps, counts = num_steps + 1, scheduler.counts
        table_bytes = max(table_bytes, allocator.usage().table_bytes)
    return Saturated(shares.mean(), counts, num_steps, table_bytes)
