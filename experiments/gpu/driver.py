"""gpu-check, stage driver: what each call of the driver costs, idle and beside running kernels."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np

from ...geometry import KVGeometry, LayerShape
from ...vmm.driver import Driver
from .stage import StageReport, Target, require

NUM_PAGES = 8  # in a round
MULTIPLES = (1, 4, 16, 64)  # of the granularity
MAX_ROUNDS = 100
Times = dict[str, list[int]]


def run(report: StageReport, target: Target) -> None:
    """Time every verb per page size, then growth of a cache across a page."""
    driver = target.driver()
    report.settings |= {"granularity": driver.granularity, "pages_per_round": NUM_PAGES}
    shares = 2 * len(MULTIPLES) + 1
    for multiple in MULTIPLES if target.is_gpu else MULTIPLES[:2]:
        for busy in (False, True) if target.is_gpu else (False,):
            with report.check(f"{multiple} × granularity" + (", busy" if busy else "")):
                _verbs(report, target, driver, multiple, busy, report.seconds / shares)
    with report.check("growth across a page"):
        _growth(report, driver, report.seconds / shares)
    with report.check("everything is given back"):
        driver.close()
    if target.kind == "conformance":
        report.headline = "calls are right; their times are not a GPU's"
        return
    report.headline = ", ".join(
        f"{row['op']} {row['us_p50']:.1f} µs"
        for row in report.rows
        if row["op"] in ("create", "map", "allow run", "unmap run")
        and row["page_bytes"] == driver.granularity
        and not row["busy"]
    )


def _verbs(
    report: StageReport, target: Target, driver: Driver, multiple: int, busy: bool, seconds: float
) -> None:
    size = multiple * driver.granularity
    times: Times = {}
    num_rounds = num_overlapped = 0
    deadline = perf_counter_ns() + seconds * 1e9
    kernels = Kernels(target) if busy else None
    while num_rounds < MAX_ROUNDS and (num_rounds < 3 or perf_counter_ns() < deadline):
        if kernels is not None:
            kernels.queue()
        _round(driver, size, times, waits=not busy)
        if kernels is not None:
            num_overlapped += kernels.are_running()
            target.synchronize()
        num_rounds += 1
    for op, durations in times.items():
        report.add(op=op, page_bytes=size, busy=busy, **_percentiles(durations))
    if busy:
        # Told, not judged: whether a call waits for the device is the device's affair.
        report.add(
            op="rounds that ended before the kernels",
            page_bytes=size,
            busy=True,
            calls=num_rounds,
            share=num_overlapped / num_rounds,
        )


def _round(driver: Driver, size: int, times: Times, *, waits: bool) -> None:
    """The life of some pages; every call timed on its own. ``unmap`` is once per run."""

    def timed(op: str, call: Callable[..., Any], *arguments: int) -> Any:
        start = perf_counter_ns()
        result = call(*arguments)
        times.setdefault(op, []).append(perf_counter_ns() - start)
        return result

    address: int = timed("reserve", driver.reserve, NUM_PAGES * size)
    pages: list[int] = [timed("create", driver.create, size) for _ in range(NUM_PAGES)]
    for i, page in enumerate(pages):
        timed("map", driver.map, address + i * size, size, page)
    timed("allow one", driver.allow, address, size)
    timed("allow run", driver.allow, address, NUM_PAGES * size)
    if waits:
        fence = timed("fence", driver.fence)
        timed("wait", driver.wait, fence)
    timed("unmap run", driver.unmap, address, NUM_PAGES * size)
    for page in pages:
        timed("release", driver.release, page)
    timed("free", driver.free, address, NUM_PAGES * size)


class Kernels:
    """Some tens of milliseconds of work on the current stream, on memory of torch's own."""

    def __init__(self, target: Target) -> None:
        import torch

        self._matrix = torch.zeros(8192, 8192, dtype=torch.bfloat16, device=target.device)
        self._out = torch.empty_like(self._matrix)
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.queue()
        target.synchronize()

    def queue(self) -> None:
        """Return at once, with the device busy."""
        import torch

        for _ in range(30):
            torch.mm(self._matrix, self._matrix, out=self._out)
        self._event.record()

    def are_running(self) -> bool:
        """Whether the queued work has not ended yet."""
        return not self._event.query()


def _growth(report: StageReport, driver: Driver, seconds: float) -> None:
    """``grow`` of one sequence by one token: K and V take a page each, or none."""
    from ...vmm.allocator import VmmAllocator
    from ...vmm.cache import VmmKVCache

    size = driver.granularity
    geometry = KVGeometry("growth", (LayerShape(1, size // 16 // 2),), 1, "bfloat16")
    times: Times = {}
    num_rounds, deadline = 0, perf_counter_ns() + seconds * 1e9
    with VmmKVCache(geometry, 16 * size, size, driver=driver) as cache:
        while num_rounds < MAX_ROUNDS and (num_rounds < 3 or perf_counter_ns() < deadline):
            for op, prepare in (
                ("grow, pages created", cache.reclaim),
                ("grow, pages pooled", lambda: VmmAllocator.reclaim(cache)),
                ("grow, pages warm", lambda: None),
            ):
                prepare()
                cache.admit("a", 16)
                start = perf_counter_ns()
                refused = cache.grow(["a"])
                times.setdefault(op, []).append(perf_counter_ns() - start)
                start = perf_counter_ns()
                cache.grow(["a"])
                times.setdefault("grow inside a page", []).append(perf_counter_ns() - start)
                require(not refused, f"{op}: refused")
                cache.release("a")
            num_rounds += 1
    for op, durations in times.items():
        report.add(op=op, page_bytes=size, busy=False, **_percentiles(durations))


def _percentiles(durations: list[int]) -> dict[str, Any]:
    """Microseconds."""
    p50, p99 = np.percentile(durations, [50, 99]) / 1e3
    return {
        "calls": len(durations),
        "us_p50": float(p50),
        "us_p99": float(p99),
        "us_max": max(durations) / 1e3,
    }
