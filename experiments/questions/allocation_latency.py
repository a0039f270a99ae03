"""How long do admission and growth take on real memory, and what do warm rows save?

Real caches without attention: only the verbs are called, and timed from outside. The mapped
cache is served the same requests in four states: pages created on the way (first pass), pages
created before but mapped nowhere (pooled), rows still mapped from the pass before (warm), and a
thread that maps ahead while the step "computes" (a pause, the same for every backend). All take
turns, several times over.

Of the contiguous and the paged cache this times the books alone: their memory was reserved when
they were made, and the system provides it when it is first written. A mapped page is provided,
zeroed, when it is mapped. The calls that mapping takes grow with the layers, which are four here.

Refuted if warm rows needed as many driver calls as pooled ones, or if mapping ahead left growth
as slow at the 99th percentile as the first pass.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...geometry import KVGeometry
from ...telemetry import Clock, MeasuredAllocator
from ..errors import BadInput
from ..generators import generate
from ..output import parse_bytes
from ..registry import Report
from ..row_tables import Column, Columns, Row
from ..saturated import drain
from ..specs import parse_spec
from ..trace import Trace

if TYPE_CHECKING:
    from ...contract import KVCache
    from ...vmm.cache import VmmKVCache

SIMULATED = False
OPS = ("admit", "grow")
QUANTILES = np.concatenate([np.linspace(0, 0.9, 19), 1 - np.geomspace(0.08, 1e-3, 20), [1]])
MODEL = KVGeometry.uniform(
    "four layers of Llama-3-8B", layers=4, q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16"
)
COLUMNS: Columns = (
    Column("backend", "backend"),
    Column("state", "state"),
    Column("call", "op"),
    Column("calls", "calls"),
    Column("p50, µs", "us_p50"),
    Column("p90, µs", "us_p90"),
    Column("p99, µs", "us_p99"),
    Column("max, µs", "us_max"),
    Column("driver calls a pass", "driver_calls"),
)


@dataclass(frozen=True)
class Config:
    """Requests, how many run at once, rounds, pages of the mapped cache, the pause of a step."""

    requests: int = 120
    running: int = 12
    rounds: int = 3
    pages: tuple[str, ...] = ("64KiB", "2MiB")
    memory: str = "1GiB"
    pause_ms: float = 2.0
    ahead_tokens: int = 8
    seed: int = 0


CONFIG = Config()
QUICK = Config(requests=12, running=4, rounds=2, pages=("64KiB",), memory="256MiB", pause_ms=0.2)


class Pass(NamedTuple):
    """One pass over the trace: microseconds of each call; calls of the driver, if there is one."""

    us: dict[str, npt.NDArray[np.float64]]
    driver_calls: int | None


Passes = dict[tuple[str, str], list[Pass]]
"""By backend and state."""


def run(config: Config, report: Report) -> list[Row]:
    """One row per backend, state and call.

    Raises
    ------
    BadInput
        Not on Linux: the host driver needs it.
    """
    trace = generate("sharegpt", requests=config.requests, seed=config.seed, rate=0)
    trace = trace.with_max_new(None)
    passes: Passes = defaultdict(list)
    total = config.rounds * (2 + 4 * len(config.pages))
    for _ in range(config.rounds):
        for name in ("contiguous:max", "paged:16"):
            report.progress(sum(map(len, passes.values())), total)
            memory = parse_bytes(config.memory)
            with parse_spec(name, slots=False).cache(MODEL, memory, device="cpu") as cache:
                passes[name, "–"].append(_pass(cache, trace, config))
        for page in config.pages:
            report.progress(sum(map(len, passes.values())), total)
            try:
                _mapped(page, trace, config, passes)
            except OSError as error:
                raise BadInput(f"the host driver cannot map here: {error}") from error
    return [_row(*of, op, found) for of, found in passes.items() for op in OPS]


def _mapped(page: str, trace: Trace, config: Config, passes: Passes) -> None:
    from ...vmm import VmmAllocator, VmmKVCache

    name, page_bytes, memory = f"vmm:{page}", parse_bytes(page), parse_bytes(config.memory)
    with VmmKVCache(MODEL, memory, page_bytes) as cache:
        passes[name, "first pass"].append(_pass(cache, trace, config))
        passes[name, "warm rows"].append(_pass(cache, trace, config))
        VmmAllocator.reclaim(cache)  # unmaps, but keeps the pages
        passes[name, "pooled"].append(_pass(cache, trace, config))
    with VmmKVCache(MODEL, memory, page_bytes, ahead_tokens=config.ahead_tokens) as cache:
        passes[name, "mapping ahead"].append(_pass(cache, trace, config))


def _pass(cache: KVCache, trace: Trace, config: Config) -> Pass:
    """Serve the trace once."""
    measured = MeasuredAllocator(cache, Clock())
    before = _driver_calls(cache)
    for _ in drain(trace, measured, max_running=config.running):
        time.sleep(config.pause_ms / 1e3)
    calls = _driver_calls(cache)
    us = {op: np.array(measured.clock.durations[op]) / 1e3 for op in OPS}
    return Pass(us, None if calls is None or before is None else calls - before)


def _row(name: str, state: str, op: str, passes: list[Pass]) -> Row:
    """All passes of a backend in a state as one; driver calls are those of one pass, the mean."""
    us = np.concatenate([one.us[op] for one in passes])
    calls = [one.driver_calls for one in passes if one.driver_calls is not None]
    p50, p90, p99 = np.percentile(us, [50, 90, 99])
    return {
        "backend": name,
        "state": state,
        "op": op,
        "calls": len(us),
        "us_p50": float(p50),
        "us_p90": float(p90),
        "us_p99": float(p99),
        "us_max": float(us.max()),
        "driver_calls": sum(calls) / len(calls) if calls else None,
        "quantiles": np.quantile(us, QUANTILES).round(2).tolist(),
    }


def _driver_calls(cache: KVCache | VmmKVCache) -> int | None:
    """Calls of the driver so far; None for a cache without one."""
    physical: Any = getattr(cache, "physical", None)
    return None if physical is None else sum(physical.driver.num_calls.values())


def plot(rows: list[Row], out: Path) -> list[Path]:
    """Share of the calls that took longer than so many microseconds."""
    from .. import style

    lines = {"–": "solid", "first pass": "solid", "pooled": "dashed", "warm rows": "dotted",
             "mapping ahead": "dashdot"}  # fmt: skip
    mapped = [name for name in dict.fromkeys(r["backend"] for r in rows) if "vmm" in name]
    with style.applied():
        figure, panels = style.panels(2 * len(mapped), height=2.6)
        for at, (axes, op) in enumerate(zip(panels, OPS * len(mapped), strict=True)):
            page = mapped[at // 2]
            for row in rows:
                if row["op"] != op or ("vmm" in row["backend"] and row["backend"] != page):
                    continue
                label = row["backend"] + ("" if row["state"] == "–" else f", {row['state']}")
                look = style.backend_style(row["backend"])
                share = 100 * np.maximum(1 - QUANTILES, 5e-4)
                axes.plot(row["quantiles"], share, ls=lines[row["state"]], color=look.color,
                          marker=look.marker, markevery=4, ms=3, label=label)  # fmt: skip
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_yticks((100, 10, 1, 0.1), ("100", "10", "1", "0.1"))
            style.title(axes, f"{op}, {page}", "")
            axes.set_xlabel("µs")
            if at % 2:  # to the right, where growth leaves room; the lines are those of admit, too
                axes.legend(fontsize=7, loc="upper right", handlelength=4)
            else:
                axes.set_ylabel("% of calls longer")
        style.heading(figure, "Allocation latency on real memory (host)")
        return style.save(figure, out, "allocation-latency")
