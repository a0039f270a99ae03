"""What compare.json says of a run: peaks, times, and what was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..telemetry import Clock
from .recorder import Recorder, in_tokens
from .trace import Trace

if TYPE_CHECKING:
    from .compare import Settings

ALLOCATE = ("admit", "grow", "release", "offload", "restore")
"""The calls whose times are those of the allocator."""


def peaks(recorder: Recorder, token_bytes: int) -> dict[str, Any]:
    """The largest of each book over all steps, in tokens."""
    return {
        "peak_live": in_tokens(recorder.peak_live, token_bytes),
        "peak_reserved": in_tokens(recorder.peak_reserved, token_bytes),
        "peak_waste": in_tokens(recorder.peak_waste, token_bytes),
        "peak_fragmentation": recorder.peak_fragmentation,
    }


def times(clock: Clock | None, total: float) -> dict[str, Any]:
    """Times of a real run; null without one."""
    if clock is None:
        return {
            "seconds": dict.fromkeys(("allocate", "write", "view", "attend", "total")),
            "allocate_us": {"p50": None, "p99": None, "max": None},
            "attend_ms": {"p50": None, "p99": None},
            "tpot_ms": {"p50": None, "p99": None},
        }
    allocate = percentiles(clock.all_durations(*ALLOCATE), 1e3)
    attend = percentiles(clock.all_durations("attend"), 1e6)
    step = percentiles(clock.all_durations("step"), 1e6)
    return {
        "seconds": {
            "allocate": clock.seconds(*ALLOCATE),
            "write": clock.seconds("write"),
            "view": clock.seconds("view"),
            "attend": clock.seconds("attend", "prefill"),
            "total": total,
        },
        "allocate_us": allocate,
        "attend_ms": {"p50": attend["p50"], "p99": attend["p99"]},
        "tpot_ms": {"p50": step["p50"], "p99": step["p99"]},
    }


def percentiles(durations_ns: list[int], unit_ns: float) -> dict[str, float | None]:
    """Median, 99th percentile and maximum in the given unit; null for no durations."""
    if not durations_ns:
        return {"p50": None, "p99": None, "max": None}
    values = np.array(durations_ns) / unit_ns
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "max": float(values.max())}


def described_trace(trace: Trace, settings: Settings) -> dict[str, Any]:
    """What was replayed."""
    return {
        "name": trace.name,
        "requests": len(trace),
        "prompt_tokens": int(trace.prompt.sum()),
        "output_tokens": int(trace.output.sum()),
        "max_context": int((trace.prompt + trace.output).max()),
        "unit": trace.unit,
        "step_ms": settings.step_ms if trace.unit == "s" else None,
        "notices": list(trace.notices),
    }


def described_settings(settings: Settings) -> dict[str, Any]:
    """What it was replayed with."""
    return {
        "mode": "run" if settings.run else "account",
        "model": settings.geometry.name,
        "dtype": settings.geometry.dtype,
        "bytes_per_token": settings.geometry.bytes_per_token,
        "memory_bytes": settings.memory_bytes,
        "on_full": settings.on_full,
        "on_failure": settings.on_failure,
        "device": settings.device if settings.run else None,
        "layout": settings.layout,
        "seed": settings.seed,
    }
