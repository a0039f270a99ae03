"""One trace on one allocator: the same loop for the books alone and for real runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..contract import Allocator, Usage
from ..sequences import Ints
from .recorder import Number, Recorder, in_tokens
from .scheduler import Scheduler
from .scheduling import Counts, OnFailure, OnFull, Placed
from .trace import Trace, check_trace

MAX_OWNER_ENTRIES = 50_000
"""Owners are recorded only as long as they stay this small: they are for pictures."""


class Engine(Protocol):
    """What a real run does with the tokens; the books alone do nothing."""

    def begin_step(self, arrivals: range) -> None:
        """A step of the scheduler begins, in which these requests arrive."""
        ...

    def prefill(self, placed: list[Placed]) -> None:
        """Write and attend the prompts that this step placed, each from its cached tokens on.

        Called in every step, perhaps with none, before anybody grows or leaves.
        """
        ...

    def decode(self, requests: list[int]) -> None:
        """Write and attend the newest token of each active request, as one batch."""
        ...


@dataclass
class Owners:
    """Who held which token slots at the end of each step.

    Attributes
    ----------
    rows : list
        Per step ``[start, stop, request, stored]``: slots, whose they are, and how many of
        them hold a token. Books do not tell that by interval: the tokens of a request fill its
        intervals in their order, those that a sliding window let go of included.
    refusals : list
        ``[step, request]``, and where the backend counts tokens needed, free, largest_free.
    numbers : dict
        Per step the books in tokens, and how many requests wait. Unlike the recorder's series
        they are never thinned: a picture of one step needs the numbers of that step.
    """

    steps: list[int] = field(default_factory=list)
    rows: list[list[list[float]]] = field(default_factory=list)
    refusals: list[list[float]] = field(default_factory=list)
    numbers: dict[str, list[Number]] = field(
        default_factory=lambda: {
            name: [] for name in ("live", "reserved", "free", "largest_free", "waiting")
        }
    )
    num_entries: int = 0


@dataclass
class Result:
    """The outcome of a replay."""

    counts: Counts
    recorder: Recorder
    owners: Owners | None = field(repr=False)


def replay(
    trace: Trace,
    allocator: Allocator,
    *,
    step_ms: float = 25.0,
    on_full: OnFull = "queue",
    on_failure: OnFailure = "recompute",
    engine: Engine | None = None,
    owners: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Replay a trace whose ``max_new`` is resolved; see ``scheduler`` for the order of a step.

    Parameters
    ----------
    step_ms
        Length of a step, for traces that arrive in seconds.
    owners
        Record who holds which slot (small runs).
    progress
        Called now and then with the number of requests done with.

    Raises
    ------
    TypeError, ValueError
        No trace or no allocator, an unknown choice, an allocator that holds other sequences, or
        a trace of which ``max_new`` is missing in part.
    BadInput
        The system has less memory than the cache may take, and nobody is left to make room.
    """
    check_trace(trace)
    arriving = _Arrivals(trace.steps(step_ms))
    scheduler = Scheduler(
        allocator,
        trace.prompt,
        trace.output,
        trace.max_new,
        on_full=on_full,
        on_failure=on_failure,
        prefix=trace.prefix,
        prefill=None if engine is None else engine.prefill,
    )
    recorder, owned = Recorder(), Owners() if owners else None
    now = 0
    while arriving.are_left or scheduler.active or scheduler.waiting:
        if not scheduler.active and not scheduler.waiting:
            now = arriving.next_step  # idle steps are skipped
        arrivals = arriving.at(now)
        if engine is not None:
            engine.begin_step(arrivals)
        scheduler.step(arrivals)
        if engine is not None and scheduler.active:
            engine.decode(scheduler.active)
        usage = allocator.usage()
        recorder.sample(now, usage)
        if owned is not None:
            owned = _record_owners(owned, now, usage, scheduler)
        if progress is not None and recorder.num_steps % 64 == 0:
            progress(arriving.num_arrived - len(scheduler.active) - len(scheduler.waiting))
        now += 1
    if progress is not None:
        progress(len(trace))
    return Result(scheduler.counts, recorder, owned)


class _Arrivals:
    """Requests by the step in which they arrive, asked for in order: no search within the loop."""

    def __init__(self, steps: Ints) -> None:
        self.num_arrived = 0
        self._steps = steps
        self._ends = iter([*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)])

    @property
    def are_left(self) -> bool:
        return self.num_arrived < len(self._steps)

    @property
    def next_step(self) -> int:
        """When the next ones arrive."""
        return int(self._steps[self.num_arrived])

    def at(self, step: int) -> range:
        """Those that arrive in a step, none of them asked for before."""
        begin = self.num_arrived
        if self.are_left and self.next_step == step:
            self.num_arrived = next(self._ends)
        return range(begin, self.num_arrived)


def _record_owners(owned: Owners, step: int, usage: Usage, scheduler: Scheduler) -> Owners | None:
    allocator = scheduler.allocator
    token_bytes = allocator.geometry.bytes_per_token
    row: list[list[float]] = []
    for request in scheduler.active:
        left: float = allocator.length(request)
        for start, stop in allocator.spans(request):
            stored = min(left, (stop - start) / token_bytes)
            left -= stored
            row.append([start / token_bytes, stop / token_bytes, request, stored])
    owned.num_entries += len(row)
    if owned.num_entries > MAX_OWNER_ENTRIES:
        return None
    owned.steps.append(step)
    owned.rows.append(row)
    for name, values in owned.numbers.items():
        values.append(
            len(scheduler.waiting)
            if name == "waiting"
            else in_tokens(getattr(usage, name), token_bytes)
        )
    for request, refusal in scheduler.refusals:
        numbers = [refusal.needed, refusal.free, refusal.largest_free]
        owned.refusals.append([step, request, *(numbers if refusal.unit == "tokens" else [])])
    return owned


def owners_json(owned: Owners | None, capacity_tokens: float) -> dict[str, Any] | None:
    """The ``owners`` field of compare.json."""
    if owned is None:
        return None
    rows = [
        [[int(x) if float(x).is_integer() else x for x in span] for span in row]
        for row in owned.rows
    ]
    return {
        "slots": capacity_tokens,
        "steps": owned.steps,
        "rows": rows,
        "refusals": owned.refusals,
        "numbers": owned.numbers,
    }
