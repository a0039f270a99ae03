"""How long do tokens of a transformers model take on each backend, and how much is the allocator?

A Llama with random weights answers the requests of a trace with continuous batching: each step is
one forward over the prompts that were placed and the newest token of every running request, and
what it answers is fed back. Arrivals are counted in steps, so that all backends meet the same
load however fast they are; the times are this machine's. Beside the figure stands
``serve.trace.json`` with all calls of some steps, to be opened in Perfetto (ui.perfetto.dev) or
chrome://tracing: one process per backend, lanes for the allocator, the kernels and the model.

Refuted if a request was answered differently on another backend, or if any allocator took more of
a run than attention.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from ...geometry import KVGeometry
from ...telemetry import Clock, Measured
from ..chrome_trace import chrome_trace
from ..errors import BadInput
from ..output import parse_bytes, write_atomic
from ..readers import read_trace
from ..registry import Report
from ..replay import replay
from ..row_tables import Column, Columns, Row, percent
from ..scheduling import OnFailure
from ..specs import parse_spec
from ..trace import Trace
from .serve_rows import LANES, PARTS, Served, answers_of, row_of

SIMULATED = False
MODEL = KVGeometry.uniform(
    "Llama, random weights", layers=4, q_heads=8, kv_heads=2, head_dim=64, dtype="float32"
)
SMALL = KVGeometry.uniform(
    "Llama, random weights", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="float32"
)
VOCABULARY = 1000
COLUMNS: Columns = (
    Column("backend", "backend"),
    Column("TPOT p50, ms", "tpot_ms_p50"),
    Column("p99, ms", "tpot_ms_p99"),
    Column("TTFT p50, ms", "ttft_ms_p50"),
    Column("p99, ms", "ttft_ms_p99"),
    Column("tokens/s", "tokens_per_s"),
    Column("allocate", "allocate_share", percent),
    Column("write", "write_share", percent),
    Column("attend", "attend_share", percent),
    Column("model", "model_share", percent),
    Column("peak batch", "peak_batch"),
    Column("preemptions", "preemptions"),
    Column("reserved, tokens", "peak_reserved"),
    Column("live, tokens", "peak_live"),
    Column("answered differently", "num_different"),
)


@dataclass(frozen=True)
class Config:
    """Trace, how much of it and how fast it comes, model, memory, preemption, backends, and how
    often each serves the trace."""

    trace: str = "chat"
    requests: int = 56
    step_ms: float = 100.0
    model: KVGeometry = MODEL
    memory: str = "12MiB"
    on_failure: OnFailure = "recompute"
    backends: tuple[str, ...] = (
        "contiguous:max",
        "paged:16",
        "paged:64",
        "vmm:64KiB",
        "vmm:64KiB:interleaved",
        "vmm:2MiB:interleaved",
    )
    rounds: int = 3
    seed: int = 0


CONFIG = Config()
QUICK = Config(
    requests=10,
    model=SMALL,
    memory="512KiB",
    backends=("contiguous:max", "paged:16", "paged:64", "vmm:4KiB", "vmm:64KiB:interleaved"),
    rounds=1,
)


def run(config: Config, report: Report) -> list[Row]:
    """One row per backend, of its quickest round; all backends serve in turn in each round.

    ``peak_reserved`` and ``peak_live`` are tokens; ``num_different`` requests were answered
    otherwise than by the first backend, in any round; ``events`` are ``[start, duration]`` in
    microseconds, by call.

    Raises
    ------
    BadInput
        transformers is missing.
    """
    if find_spec("transformers") is None:
        raise BadInput("transformers is missing: pip install 'kvalloc[transformers]'")
    from .serve_engine import prompt_ids
    from .serve_model import random_model, serving

    trace = read_trace(config.trace, seed=config.seed).head(config.requests).with_max_new(None)
    prompts = prompt_ids(trace, VOCABULARY, config.seed)
    model = serving(random_model(config.model, VOCABULARY, config.seed))
    best: dict[str, Served] = {}
    answers: list[list[int]] = []
    different = dict.fromkeys(config.backends, 0)
    turns = [name for _ in range(config.rounds) for name in config.backends]
    for done, name in enumerate(turns):
        report.progress(done, len(turns))
        if name not in best:  # the first use pays for compiling kernels
            serve(name, trace.head(1), config, model, prompts)
        served = serve(name, trace, config, model, prompts)
        mine = answers_of(served.engine, trace)
        answers = answers or mine
        wrong = sum(one != other for one, other in zip(answers, mine, strict=True))
        different[name] = max(different[name], wrong)
        if name not in best or served.seconds < best[name].seconds:
            best[name] = served
    return [
        row_of(name, trace, best[name]) | {"num_different": different[name]}
        for name in config.backends
    ]


def serve(
    name: str, trace: Trace, config: Config, model: Any, prompts: Sequence[list[int]]
) -> Served:
    """Replay a trace on one backend with the model's tokens.

    Parameters
    ----------
    model
        From ``serve_model.serving``.
    prompts
        Token ids of each request.
    """
    from .serve_engine import ServeEngine

    clock = Clock()
    prompts = prompts[: len(trace)]
    cache = parse_spec(name, slots=False).cache(
        # One layout for all, so that kernels are compared fairly.
        config.model, parse_bytes(config.memory), device="cpu", layout="token-major"
    )  # fmt: skip
    with Measured(cache, clock) as measured:
        engine = ServeEngine(measured, clock, model, prompts)
        start = perf_counter()
        result = replay(
            trace, measured, step_ms=config.step_ms, on_failure=config.on_failure, engine=engine
        )
        seconds = perf_counter() - start
        measured.check_invariants()
    return Served(engine, result, clock, seconds, config.model.bytes_per_token)


# Far enough apart in lightness to be told in a grey print.
COLORS = {"allocate": "#9a4a0f", "write": "#b9cc6a", "attend": "#5793b8", "model": "#2f2750",
          "rest": "#e4e4e4"}  # fmt: skip


def plot(rows: list[Row], out: Path) -> list[Path]:
    """Times per token and to the first one, and what a forward's time consists of."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    from .. import style

    calls = {row["backend"]: row["events"] for row in rows}
    trace = write_atomic(out / "serve.trace.json", json.dumps(chrome_trace(calls, LANES)) + "\n")
    with style.applied():
        figure = Figure(figsize=(9.6, 0.36 * len(rows) + 1.9), layout="constrained")
        panels = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1, 1.4))
        for axes, key, label in (
            (panels[0], "tpot_ms", "time per token, ms"),
            (panels[1], "ttft_ms", "time to first token, ms"),
        ):
            for at, row in enumerate(rows):
                color, _, marker = style.backend_style(row["backend"])
                p50, p99 = row[f"{key}_p50"], row[f"{key}_p99"]
                axes.plot([p50, p99], [at, at], color=color, lw=1.2)
                axes.plot([p50], [at], color=color, marker=marker, ms=6)
                axes.plot([p99], [at], color=color, marker="|", ms=9)
            axes.set_xscale("log")
            axes.margins(x=0.12)
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes.xaxis.set_major_formatter(style.thousands())
            axes.minorticks_off()
            style.title(axes, label, "median and 99th percentile of the requests")
        left = np.zeros(len(rows))
        for part in PARTS:
            width = np.array(
                [r[f"{part}_share"] * r["seconds"] / r["forwards"] * 1e3 for r in rows]
            )
            panels[2].barh(
                range(len(rows)), width, 0.65, left, label=part,
                color=COLORS[part], edgecolor=style.INK, linewidth=0.3,
            )  # fmt: skip
            left += width
        style.title(panels[2], "a step, ms", "mean over the run")
        panels[0].set_yticks(range(len(rows)), list(calls))
        panels[0].invert_yaxis()
        figure.legend(*panels[2].get_legend_handles_labels(), loc="outside lower right", ncols=5)
        style.heading(figure, "A model with random weights, served with continuous batching")
        return [*style.save(figure, out, "serve"), trace]
