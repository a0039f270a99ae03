"""When does a real run allocate, write and attend, and how long is each?

Real memory, real writes and real attention on the CPU, every call timed where it is made. Beside
the figure of a few steps stands ``timeline.trace.json`` with all recorded calls, to be opened in
Perfetto (ui.perfetto.dev) or chrome://tracing: one process per backend, a lane for the
allocator and one for the kernels.

Refuted if the allocator took more of a run's time than attention.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...models import geometry
from ..chrome_trace import Spans, chrome_trace
from ..output import parse_bytes, write_atomic
from ..readers import read_trace
from ..registry import Report
from ..replay import replay
from ..row_tables import Column, Columns, Row, percent
from ..scheduling import Placed
from ..specs import parse_spec

if TYPE_CHECKING:
    from ...contract import KVCache
    from ...telemetry import Clock

SIMULATED = False
LANES = {
    "admit": "allocator",
    "grow": "allocator",
    "release": "allocator",
    "write": "kernels",
    "view": "kernels",
    "prefill": "kernels",
    "attend": "kernels",
}
MAX_EVENTS = 500
COLUMNS: Columns = (
    Column("backend", "backend"),
    Column("call", "call"),
    Column("calls", "calls"),
    Column("total, ms", "total_ms"),
    Column("of all calls", "share", percent),
    Column("p50, µs", "us_p50"),
    Column("max, µs", "us_max"),
)


@dataclass(frozen=True)
class Config:
    """Trace and how much of it, model, memory and backends."""

    trace: str = "chat"
    requests: int = 6
    model: str = "tiny"
    memory: str = "64MiB"
    backends: tuple[str, ...] = ("contiguous:max", "paged:16", "vmm:64KiB")
    seed: int = 0


CONFIG = Config()
QUICK = Config(requests=3, memory="16MiB", backends=("paged:16", "vmm:64KiB"))


class LayerEngine:
    """Writes and attends random values, every call under its own name."""

    def __init__(self, cache: KVCache, clock: Clock, seed: int) -> None:
        import torch

        self._cache, self._clock = cache, clock
        self._generator = torch.Generator().manual_seed(seed)

    def begin_step(self, arrivals: range) -> None:
        """Every call is timed by itself: steps do not matter."""

    def prefill(self, placed: list[Placed]) -> None:
        """Write and attend each prompt."""
        for request, tokens, cached in placed:
            self._layers([request], [tokens - cached], "prefill")

    def decode(self, requests: list[int]) -> None:
        """Write and attend one token of each."""
        self._layers(requests, [1] * len(requests), "attend")

    def _layers(self, requests: list[int], lens: list[int], name: str) -> None:
        import torch

        from ...kernels.attention import attend

        shapes = self._cache.geometry.layers
        for layer, shape in enumerate(shapes):
            size = (sum(lens), shape.kv_heads, shape.head_dim)
            kv = torch.randn(*size, generator=self._generator)
            q = kv.repeat_interleave(self._cache.geometry.q_heads // shape.kv_heads, 1)
            self._cache.write(layer, requests, kv, kv, lens=lens)
            view = self._cache.view(layer, requests)
            self._clock.timed(name, attend, q, view, q_lens=lens)


def run(config: Config, report: Report) -> list[Row]:
    """One row per backend and call; ``events`` are ``[start, duration]`` in microseconds."""
    from ...telemetry import Clock, Measured

    trace = read_trace(config.trace, seed=config.seed).head(config.requests).with_max_new(None)
    rows: list[Row] = []
    for done, name in enumerate(config.backends):
        report.progress(done, len(config.backends))
        spec = parse_spec(name, slots=False)
        # The first of them pays for compiling the kernels and is not told.
        for part in (trace.head(1), trace):
            clock = Clock()
            cache = spec.cache(geometry(config.model), parse_bytes(config.memory), device="cpu")
            with Measured(cache, clock) as measured:
                replay(part, measured, engine=LayerEngine(measured, clock, config.seed))
        rows += _rows(name, clock)
    return rows


def _rows(name: str, clock: Clock) -> list[Row]:
    import numpy as np

    zero = min(starts[0] for starts in clock.starts.values())
    total = sum(clock.seconds(call) for call in LANES)
    rows = []
    for call in LANES:
        starts = (np.array(clock.starts[call]) - zero) / 1e3
        us = np.array(clock.durations[call]) / 1e3
        events = np.stack([starts, us], axis=1)[:MAX_EVENTS].round(1)
        rows.append(
            {
                "backend": name,
                "call": call,
                "calls": len(us),
                "total_ms": float(us.sum() / 1e3),
                "share": float(us.sum() / 1e6 / total),
                "us_p50": float(np.median(us)),
                "us_max": float(us.max()),
                "events": events.tolist(),
            }
        )
    return rows


# Within a lane far enough apart in lightness to be told in a grey print.
COLORS = {"admit": "#5c1a2e", "grow": "#c9821f", "release": "#d9cdec", "write": "#b9cc6a",
          "view": "#e4e4e4", "prefill": "#2f2750", "attend": "#3f7ca3"}  # fmt: skip
NUM_STEPS_DRAWN = 8


def plot(rows: list[Row], out: Path) -> list[Path]:
    """A few steps of each backend, and the whole as a trace for Perfetto."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from .. import style

    calls: dict[str, dict[str, Spans]] = {}
    for row in rows:
        calls.setdefault(row["backend"], {})[row["call"]] = row["events"]
    events = json.dumps(chrome_trace(calls, LANES)) + "\n"
    trace = write_atomic(out / "timeline.trace.json", events)
    lanes = list(dict.fromkeys(LANES.values()))
    with style.applied():
        figure = Figure(figsize=(9.6, 1.25 * len(calls) + 1.2), layout="constrained")
        grid = figure.subplots(len(calls), 1, squeeze=False)
        for axes, (name, mine) in zip(grid[:, 0], calls.items(), strict=True):
            middle = len(mine["grow"]) // 2
            begin = mine["grow"][middle][0]
            end = mine["grow"][min(middle + NUM_STEPS_DRAWN, len(mine["grow"]) - 1)][0]
            for call, found in mine.items():
                spans = [((s - begin) / 1e3, d / 1e3) for s, d in found if begin <= s < end]
                height = 1 - lanes.index(LANES[call])
                axes.broken_barh(spans, (height, 0.8), color=COLORS[call], lw=0)
            axes.set_yticks([1.4, 0.4], lanes)
            style.title(axes, name, "")
        grid[-1, 0].set_xlabel("ms")
        patches = [Patch(color=color, label=call) for call, color in COLORS.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(COLORS))
        style.heading(figure, "A few decode steps of a real run, call by call")
        return [*style.save(figure, out, "timeline"), trace]
