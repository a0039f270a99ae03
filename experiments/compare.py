"""The same trace on several backends, side by side: settings in, one JSON document out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..geometry import KVGeometry
from ..telemetry import Clock
from .environment import environment
from .errors import BadInput
from .recorder import Recorder, in_tokens
from .replay import Result, owners_json, replay
from .scheduler import OnFailure, OnFull
from .specs import Spec
from .trace import Trace

if TYPE_CHECKING:
    from .made_up import Expected, Values

Progress = Callable[[str, int], None]
Report = Callable[[int], None]
ALLOCATE = ("admit", "grow", "release", "offload", "restore")
MAX_REQUESTS_WITH_OWNERS = 200
RUN_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Settings:
    """Everything that the result depends on, besides the trace.

    Attributes
    ----------
    run : bool
        Real memory and attention; otherwise the books alone.
    layout : str | None
        Memory order of tensors, the same for all backends, so that kernels are compared fairly.
    """

    specs: tuple[Spec, ...]
    geometry: KVGeometry
    memory_bytes: int
    run: bool
    on_full: OnFull = "queue"
    on_failure: OnFailure = "recompute"
    step_ms: float = 25.0
    device: str = "cpu"
    layout: str | None = "token-major"
    verify: bool = False
    seed: int = 0


Make = Callable[[Trace, Settings, Spec, Report], tuple[Result, Clock | None, dict[str, Any]]]


def compare(trace: Trace, settings: Settings, progress: Progress | None = None) -> dict[str, Any]:
    """Replay a trace, whose ``max_new`` is resolved, on every backend.

    Returns
    -------
    dict
        ``compare.json``; token units throughout, times null for the books alone.

    Raises
    ------
    BadInput
        A backend that cannot be made, or no request that fits any backend.
    """
    if not len(trace):
        raise BadInput(f"{trace.name} has no requests: give a trace with at least one")
    _check_backends(settings)
    make = _runner(trace, settings) if settings.run else _account
    backends = [_one(make, trace, settings, spec, progress) for spec in settings.specs]
    if all(backend["never_fit"] == len(trace) for backend in backends):
        raise BadInput(
            f"no request of {trace.name} can ever fit: the shortest has "
            f"{int((trace.prompt + trace.output).min())} tokens, the memory holds "
            f"{max(backend['capacity_tokens'] for backend in backends)}; give more memory"
        )
    return {
        "schema": 1,
        "environment": environment(),
        "trace": _describe(trace, settings),
        "settings": _describe_settings(settings),
        "backends": backends,
    }


def _check_backends(settings: Settings) -> None:
    """A backend that cannot be made is told before the first one has run for a minute."""
    if settings.run and settings.geometry.dtype not in RUN_DTYPES:
        raise BadInput(
            f"no attention kernel here reads {settings.geometry.dtype}: run with --dtype one of "
            f"{', '.join(RUN_DTYPES)}, or use --account"
        )
    memory = settings.geometry, settings.memory_bytes
    for spec in settings.specs:
        if settings.run:
            spec.cache(*memory, device=settings.device, layout=settings.layout).close()
        else:
            spec.allocator(*memory)


def _one(
    make: Make, trace: Trace, settings: Settings, spec: Spec, progress: Progress | None
) -> dict[str, Any]:
    def report(done: int) -> None:
        if progress is not None:
            progress(spec.text, done)

    start = perf_counter()
    result, clock, extra = make(trace, settings, spec, report)
    total = perf_counter() - start
    counts, recorder = result.counts, result.recorder
    return {
        "spec": spec.text,
        "capacity_tokens": extra["capacity"],
        "admitted": counts.admitted,
        "rejected": counts.rejected,
        "never_fit": counts.never_fit,
        "completed": counts.completed,
        "growth_failures": counts.growth_failures,
        "fragmentation_failures": counts.fragmentation_failures,
        "preemptions": counts.preemptions,
        "hit_tokens": counts.hit_tokens,
        "recomputed_tokens": counts.recomputed_tokens,
        "swapped_tokens": counts.swapped_tokens,
        **_peaks(recorder, settings.geometry.bytes_per_token),
        "steps": recorder.num_steps,
        "tokens": counts.tokens,
        "allocations": counts.allocations,
        "table_bytes": recorder.peak_table_bytes,
        **_times(clock, total),
        "max_abs_error": extra["error"],
        "series": {
            name: values
            if name == "step"
            else [in_tokens(value, settings.geometry.bytes_per_token) for value in values]
            for name, values in recorder.series.items()
        },
        "owners": owners_json(result.owners, extra["slots"]),
    }


def _account(
    trace: Trace, settings: Settings, spec: Spec, report: Report
) -> tuple[Result, Clock | None, dict[str, Any]]:
    allocator = spec.allocator(settings.geometry, settings.memory_bytes)
    result = replay(
        trace,
        allocator,
        step_ms=settings.step_ms,
        on_full=settings.on_full,
        on_failure=settings.on_failure,
        owners=len(trace) <= MAX_REQUESTS_WITH_OWNERS,
        progress=report,
    )
    allocator.check_invariants()
    slots = in_tokens(allocator.usage().capacity, settings.geometry.bytes_per_token)
    return result, None, {"capacity": allocator.capacity, "slots": slots, "error": None}


def _runner(trace: Trace, settings: Settings) -> Make:
    """``_run`` with the values, and what they must give, that all backends share."""
    from .made_up import Expected, Values

    values = Values(
        settings.geometry, prefix=trace.prefix, seed=settings.seed, device=settings.device
    )
    return partial(_run, values, Expected(values) if settings.verify else None)


def _run(
    values: Values,
    expected: Expected | None,
    trace: Trace,
    settings: Settings,
    spec: Spec,
    report: Report,
) -> tuple[Result, Clock | None, dict[str, Any]]:
    from ..telemetry import Measured
    from .engine import Engine

    clock = Clock()
    cache = spec.cache(
        settings.geometry, settings.memory_bytes, device=settings.device, layout=settings.layout
    )
    with Measured(cache, clock) as measured:
        engine = Engine(measured, clock, values=values, expected=expected)
        result = replay(
            trace,
            measured,
            step_ms=settings.step_ms,
            on_full=settings.on_full,
            on_failure=settings.on_failure,
            engine=engine,
            owners=len(trace) <= MAX_REQUESTS_WITH_OWNERS,
            progress=report,
        )
        measured.check_invariants()
        slots = in_tokens(measured.usage().capacity, settings.geometry.bytes_per_token)
        extra = {"capacity": measured.capacity, "slots": slots, "error": engine.max_abs_error}
    return result, clock, extra


def _peaks(recorder: Recorder, token_bytes: int) -> dict[str, Any]:
    return {
        "peak_live": in_tokens(recorder.peak_live, token_bytes),
        "peak_reserved": in_tokens(recorder.peak_reserved, token_bytes),
        "peak_waste": in_tokens(recorder.peak_waste, token_bytes),
        "peak_fragmentation": recorder.peak_fragmentation,
    }


def _times(clock: Clock | None, total: float) -> dict[str, Any]:
    """Times of a real run; null without one."""
    if clock is None:
        nothing = {"allocate": None, "write": None, "attend": None, "total": None}
        return {
            "seconds": nothing,
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


def _describe(trace: Trace, settings: Settings) -> dict[str, Any]:
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


def _describe_settings(settings: Settings) -> dict[str, Any]:
    return {
        "mode": "run" if settings.run else "account",
        "model": settings.geometry.name,
        "dtype": settings.geometry.dtype,
        "bytes_per_token": settings.geometry.bytes_per_token,
        "memory_bytes": settings.memory_bytes,
        "on_full": settings.on_full,
        "on_failure": settings.on_failure,
        "device": settings.device if settings.run else None,
        "layout": settings.layout if settings.run else None,
        "seed": settings.seed,
    }
