"""The same trace on several backends, side by side: settings in, one JSON document out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..contract import Allocator
from ..geometry import KVGeometry
from ..telemetry import Clock
from .compare_fields import described_settings, described_trace, peaks, times
from .environment import environment
from .errors import BadInput
from .recorder import in_tokens
from .replay import Engine, Result, owners_json, replay
from .scheduling import OnFailure, OnFull
from .specs import Spec
from .trace import Trace, check_trace

if TYPE_CHECKING:
    from .made_up import Expected, Values

Progress = Callable[[str, int], None]
Tell = Callable[[int], None]
MAX_REQUESTS_WITH_OWNERS = 200
RUN_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Settings:
    """Everything that the result depends on, besides the trace.

    Attributes
    ----------
    specs : tuple of Spec
        The backends, from ``parse_spec``. One of your own is any object with ``text`` (its name in
        the results), ``kind`` and ``allocator(geometry, memory_bytes, layout=…)``; for ``run`` with
        ``cache(geometry, memory_bytes, device=…, layout=…)``.
    geometry : KVGeometry
        Of the model; ``SLOTS`` counts tokens alone.
    memory_bytes : int
        What each backend has.
    run : bool
        Real memory and attention; otherwise the books alone.
    on_full, on_failure, step_ms
        As for ``replay``.
    device : str
        Where a real run has its tensors.
    layout : str
        Memory order of tensors, the same for all backends, so that kernels are compared fairly;
        the books of mapped memory depend on it, since each buffer has pages of its own.
    verify : bool
        Compare every output of a real run with float64 (``max_abs_error``).
    seed : int
        Of the keys, values and queries of a real run.
    """

    specs: tuple[Spec, ...]
    geometry: KVGeometry
    memory_bytes: int
    run: bool
    on_full: OnFull = "queue"
    on_failure: OnFailure = "recompute"
    step_ms: float = 25.0
    device: str = "cpu"
    layout: str = "token-major"
    verify: bool = False
    seed: int = 0


Make = Callable[[Trace, Settings, Spec, Tell], tuple[Result, Clock | None, dict[str, Any]]]


def compare(trace: Trace, settings: Settings, progress: Progress | None = None) -> dict[str, Any]:
    """Replay a trace, whose ``max_new`` is resolved, on every backend.

    Returns
    -------
    dict
        ``compare.json``; token units throughout, times null for the books alone.

    Raises
    ------
    TypeError
        No trace, or a backend that is only named.
    BadInput
        No backend or one that cannot be made, or no request that fits any.
    """
    check_trace(trace)
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
        "trace": described_trace(trace, settings),
        "settings": described_settings(settings),
        "backends": backends,
    }


def _check_backends(settings: Settings) -> None:
    """A backend that cannot be made is told before the first one has run for a minute."""
    if settings.run and settings.geometry.dtype not in RUN_DTYPES:
        raise BadInput(
            f"no attention kernel here reads {settings.geometry.dtype}: run with --dtype one of "
            f"{', '.join(RUN_DTYPES)}, or use --account"
        )
    if not settings.specs:
        raise BadInput("there is no backend to compare: give at least one Spec")
    maker = "cache" if settings.run else "allocator"
    for spec in settings.specs:
        if not all(hasattr(spec, needed) for needed in ("text", "kind", maker)):
            raise TypeError(
                f"a backend is a Spec or has text, kind and {maker} as one, not {spec!r}: "
                "kvalloc.experiments.specs.parse_spec makes one"
            )
    memory = settings.geometry, settings.memory_bytes
    for spec in settings.specs:
        if settings.run:
            spec.cache(*memory, device=settings.device, layout=settings.layout).close()
        else:
            spec.allocator(*memory, layout=settings.layout)


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
        **peaks(recorder, settings.geometry.bytes_per_token),
        "steps": recorder.num_steps,
        "tokens": counts.tokens,
        "allocations": counts.allocations,
        "table_bytes": recorder.peak_table_bytes,
        **times(clock, total),
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
    trace: Trace, settings: Settings, spec: Spec, report: Tell
) -> tuple[Result, Clock | None, dict[str, Any]]:
    allocator = spec.allocator(settings.geometry, settings.memory_bytes, layout=settings.layout)
    result, extra = _replayed(trace, settings, allocator, report)
    return result, None, {**extra, "error": None}


def _runner(trace: Trace, settings: Settings) -> Make:
    """``_run`` with the values, and what they must give, that all backends share."""
    from .made_up import Expected, Values

    if settings.device == "cpu" and any(spec.kind == "paged" for spec in settings.specs):
        from ..kernels import paged_numba  # noqa: F401  # is compiled or loaded: nobody's time

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
    report: Tell,
) -> tuple[Result, Clock | None, dict[str, Any]]:
    from ..telemetry import Measured
    from .made_up_engine import MadeUpEngine

    clock = Clock()
    cache = spec.cache(
        settings.geometry, settings.memory_bytes, device=settings.device, layout=settings.layout
    )
    with Measured(cache, clock) as measured:
        engine = MadeUpEngine(measured, clock, values=values, expected=expected)
        result, extra = _replayed(trace, settings, measured, report, engine)
    return result, clock, {**extra, "error": engine.max_abs_error}


def _replayed(
    trace: Trace,
    settings: Settings,
    allocator: Allocator,
    report: Tell,
    engine: Engine | None = None,
) -> tuple[Result, dict[str, Any]]:
    """The outcome, and how much the allocator could hold."""
    result = replay(
        trace,
        allocator,
        step_ms=settings.step_ms,
        on_full=settings.on_full,
        on_failure=settings.on_failure,
        engine=engine,
        owners=len(trace) <= MAX_REQUESTS_WITH_OWNERS,
        progress=report,
    )
    allocator.check_invariants()
    slots = in_tokens(allocator.usage().capacity, settings.geometry.bytes_per_token)
    return result, {"capacity": allocator.capacity, "slots": slots}
