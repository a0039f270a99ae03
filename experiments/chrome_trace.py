"""Timed calls in the Trace Event Format, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Spans = list[list[float]]
"""``[start, duration]`` of each call, in microseconds."""


def chrome_trace(
    calls: Mapping[str, Mapping[str, Spans]], lanes: Mapping[str, str]
) -> dict[str, Any]:
    """Complete events: a process per backend, a lane per kind of call.

    Parameters
    ----------
    calls
        Per backend and name of the call.
    lanes
        Name of the call → lane.
    """
    names = list(dict.fromkeys(lanes.values()))
    events: list[dict[str, Any]] = []
    for pid, backend in enumerate(calls):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": backend}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}
            for tid, lane in enumerate(names)
        ]
    for pid, mine in enumerate(calls.values()):
        events += [
            {
                "ph": "X",
                "name": call,
                "cat": lanes[call],
                "pid": pid,
                "tid": names.index(lanes[call]),
                "ts": start,
                "dur": duration,
            }
            for call, spans in mine.items()
            for start, duration in spans
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
