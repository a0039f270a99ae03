"""What a run of the serving loop amounts to: latencies, shares of its time, its calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...telemetry import Clock
from ..chrome_trace import Spans
from ..compare_fields import ALLOCATE, percentiles
from ..recorder import in_tokens
from ..replay import Result
from ..row_tables import Row
from ..trace import Trace

if TYPE_CHECKING:
    from .serve_engine import ServeEngine

PARTS = ("allocate", "write", "attend", "model", "rest")
"""Of a run's time: the allocator, storing K and V and making views, attention, the rest of the
forward, and everything else (the scheduler, the books of this experiment)."""
LANES = {
    **dict.fromkeys(ALLOCATE, "allocator"),
    **dict.fromkeys(("write", "view", "attend"), "kernels"),
    "forward": "model",
}
NUM_FORWARDS = 24
"""Whose calls the trace for Perfetto has: those in the middle of the run."""


@dataclass(frozen=True)
class Served:
    """What a run leaves behind; ``seconds`` are those of the replay alone."""

    engine: ServeEngine
    result: Result
    clock: Clock
    seconds: float
    token_bytes: int


def answers_of(engine: ServeEngine, trace: Trace) -> list[list[int]]:
    """The tokens of each request: a prompt whose answer is to be empty was computed as well."""
    return [
        tokens[:most] for tokens, most in zip(engine.tokens, trace.output.tolist(), strict=True)
    ]


def row_of(name: str, trace: Trace, served: Served) -> Row:
    """What ``kvalloc run serve`` tells of one backend."""
    engine, counts, recorder = served.engine, served.result.counts, served.result.recorder
    tpot, ttft = _latencies(engine, trace)
    seconds = _parts(served)
    return {
        "backend": name,
        "requests": len(trace),
        "completed": counts.completed,
        "tokens": counts.tokens,
        "seconds": served.seconds,
        "tokens_per_s": counts.tokens / served.seconds,
        **{f"tpot_ms_{key}": tpot[key] for key in ("p50", "p99")},
        **{f"ttft_ms_{key}": ttft[key] for key in ("p50", "p99")},
        **{f"{part}_share": seconds[part] / served.seconds for part in PARTS},
        "forwards": len(served.clock.durations["forward"]),
        "peak_batch": engine.peak_batch,
        "preemptions": counts.preemptions,
        "recomputed_tokens": counts.recomputed_tokens,
        "swapped_tokens": counts.swapped_tokens,
        "hit_tokens": counts.hit_tokens,
        "peak_reserved": in_tokens(recorder.peak_reserved, served.token_bytes),
        "peak_live": in_tokens(recorder.peak_live, served.token_bytes),
        "num_changed": engine.num_changed,
        "events": _events(served.clock),
    }


def _latencies(engine: ServeEngine, trace: Trace) -> tuple[Row, Row]:
    """Milliseconds: per request its mean time per token after the first, and to the first."""
    tpot, ttft = [], []
    for request, (times, most) in enumerate(
        zip(engine.token_ns, trace.output.tolist(), strict=True)
    ):
        if most and times:
            ttft.append(times[0] - engine.arrived_ns[request])
        if most > 1 and len(times) > 1:
            tpot.append((times[-1] - times[0]) // (len(times) - 1))
    return percentiles(tpot, 1e6), percentiles(ttft, 1e6)


def _parts(served: Served) -> dict[str, float]:
    """Seconds of each part of the run."""
    clock = served.clock
    found = {
        "allocate": clock.seconds(*ALLOCATE),
        "write": clock.seconds("write", "view"),
        "attend": clock.seconds("attend"),
    }
    forward = clock.seconds("forward")
    found["model"] = forward - found["write"] - found["attend"]
    found["rest"] = served.seconds - forward - found["allocate"]
    return found


def _events(clock: Clock) -> dict[str, Spans]:
    """Start and duration in microseconds of the calls around the middle of the run."""
    forwards = clock.starts["forward"]
    first = max(0, (len(forwards) - NUM_FORWARDS) // 2)
    last = min(first + NUM_FORWARDS, len(forwards) - 1)
    begin, end = forwards[first], forwards[last]
    events: dict[str, Spans] = {}
    for call in LANES:
        starts = np.array(clock.starts.get(call, ()), np.int64)
        durations = np.array(clock.durations.get(call, ()), np.int64)
        kept = (starts >= begin) & (starts < end)
        spans = np.stack([starts[kept] - begin, durations[kept]], axis=1) / 1e3
        events[call] = spans.round(1).tolist()
    return events
