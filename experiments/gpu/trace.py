"""gpu-check, stage trace: one trace on the three backends, with the time per output token."""

from __future__ import annotations

import os
from typing import Any

from ...geometry import KVGeometry, LayerShape
from .stage import StageReport, Target, require

SPECS = ("contiguous:max", "paged:16", "vmm")
SAME = ("admitted", "completed", "tokens")


def run(report: StageReport, target: Target) -> None:
    """Replay a trace on real memory, first a little of it with every output checked."""
    # A replay times calls: a kernel that was only queued must not pass for one that ran.
    os.environ.setdefault("CUDA_LAUNCH_BLOCKING", "1")
    report.settings |= {"trace": _trace(target), "backends": SPECS, "launches": "blocking"}
    with report.check("outputs against float64"):
        for backend in _compare(target, num_requests=8, verify=True):
            error = backend["max_abs_error"]
            report.add(spec=backend["spec"], requests=8, max_abs_error=error)
            require(error < 0.05, f"{backend['spec']}: an output is off by {error:.2g}")
    with report.check("the same work on every backend"):
        backends = _compare(target, num_requests=64, verify=False)
        for backend in backends:
            kept = ("spec", *SAME, "peak_reserved", "peak_waste", "seconds")
            report.add(
                **{key: backend[key] for key in kept},
                **{key: backend[key] for key in ("allocate_us", "attend_ms", "tpot_ms")},
            )
        work = {tuple(backend[key] for key in SAME) for backend in backends}
        require(len(work) == 1, f"backends differ in {', '.join(SAME)}: {sorted(work)}")
        report.headline = "TPOT p50 " + ", ".join(
            f"{backend['spec']} {backend['tpot_ms']['p50']:.2f} ms" for backend in backends
        )


def _trace(target: Target) -> str:
    return "chat" if target.is_gpu else "article"


def _compare(target: Target, *, num_requests: int, verify: bool) -> list[dict[str, Any]]:
    from ..compare import Settings, compare
    from ..readers import read_trace
    from ..specs import parse_spec

    if target.is_gpu:
        name, q_heads, shape = "4 layers of Llama-3-8B", 32, LayerShape(8, 128)
    else:
        name, q_heads, shape = "a toy", 4, LayerShape(2, 16)
    geometry = KVGeometry(name, (shape,) * 4, q_heads, "bfloat16", max_context=8192)
    trace = (
        read_trace(_trace(target)).head(num_requests).with_max_new(None, limit=geometry.max_context)
    )
    settings = Settings(
        tuple(parse_spec(name, slots=False) for name in SPECS),
        geometry,
        (4 << 30) if target.is_gpu else (64 << 20),
        run=True,
        device=target.device.type,
        verify=verify,
    )
    backends: list[dict[str, Any]] = compare(trace, settings)["backends"]
    return backends
