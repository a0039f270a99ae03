"""Does the block size that wastes least also give the least time per output token?

The question of the article from which kvalloc began (docs/replay.md). Waste, table bytes and time
of the books come from ShareGPT-like requests on the books of Llama-3-8B in float32 in 32 GiB; time
per output token from real decode steps of one of its layers on this CPU (grow, write, attend) over
pages in random order, all block sizes in turn in every round, tokens before heads in memory. The
mapped and the contiguous cache stand beside as lines; one layer has two buffers to map, a model of
32 layers has 64.

Refuted if some block size has both the least waste and the least time per token.

Not shown: a GPU, where other sizes may win; prefill; the rest of the model, which weighs the
same for every block size and shrinks the differences in a whole step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any

from ...geometry import KVGeometry
from ...models import geometry
from ..generators import generate
from ..output import parse_bytes
from ..registry import Report
from ..row_tables import Column, Columns, Row, percent, size
from ..saturated import drain, serve
from ..specs import parse_spec

if TYPE_CHECKING:
    from ...contract import KVCache

SIMULATED = False
COLUMNS: Columns = (
    Column("backend", "backend"),
    Column("waste / held", "waste", percent),
    Column("tables", "table_bytes", size),
    Column("books, µs/token", "books_us"),
    Column("grow, µs/step", "grow_us"),
    Column("write, ms", "write_ms"),
    Column("attend, ms", "attend_ms"),
    Column("time per token, ms", "tpot_ms"),
)
LAYER = KVGeometry.uniform(
    "one layer of Llama-3-8B", layers=1, q_heads=32, kv_heads=8, head_dim=128, dtype="float32"
)
PARTS = ("grow", "write", "attend")
WARM_UP = 3


@dataclass(frozen=True)
class Config:
    """Block sizes; requests for the books; sequences, mean context and steps of real decoding."""

    blocks: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    others: tuple[str, ...] = ("vmm:64KiB", "contiguous:max")
    requests: int = 1_000
    memory: str = "32GiB"
    sequences: int = 8
    context: int = 2_048
    rounds: int = 80
    seed: int = 0


CONFIG = Config()
QUICK = Config(blocks=(1, 16, 64), requests=100, memory="2GiB", sequences=2, context=128, rounds=4)


def run(config: Config, report: Report) -> list[Row]:
    """One row per block size and other backend; times are first quartiles (grow: mean)."""
    names = [*(f"paged:{block}" for block in config.blocks), *config.others]
    total = len(names) + config.rounds + WARM_UP
    rows = []
    for done, name in enumerate(names):
        report.progress(done, total)
        rows.append({"backend": name, **_books(name, config)})
    timed = _decode(names, config)
    for done in range(len(names), total):
        report.progress(done, total)
        next(timed)
    times = next(timed)
    return [{**row, **times[row["backend"]]} for row in rows]


def _books(name: str, config: Config) -> Row:
    trace = generate("sharegpt", requests=config.requests, seed=config.seed, rate=0)
    trace = trace.with_max_new(None)
    # As the layer that is timed: a mapped page of one size then holds as many tokens in both.
    model = geometry("llama-3-8b").with_dtype(LAYER.dtype)
    memory, spec = parse_bytes(config.memory), parse_spec(name, slots=False)
    served = serve(trace, spec.allocator(model, memory))
    start = perf_counter()
    for _ in drain(trace, spec.allocator(model, memory)):
        pass
    took, mean = perf_counter() - start, served.shares
    return {
        "waste": (mean["later"] + mean["never"]) / (1 - mean["free"]),
        "table_bytes": served.table_bytes,
        "books_us": took / served.counts.tokens * 1e6,
    }


def _decode(names: list[str], config: Config) -> Iterator[dict[str, Row]]:
    """Decode a round on every backend per step; the last item holds the times."""
    import numpy as np

    rng = Random(config.seed)
    spread = config.context // 2
    lengths = [rng.randint(config.context - spread, config.context + spread)
               for _ in range(config.sequences)]  # fmt: skip
    caches = {name: _filled(name, lengths, config) for name in names}
    times: dict[str, list[list[int]]] = {name: [] for name in names}
    order = list(names)
    try:
        for round_ in range(config.rounds + WARM_UP):
            rng.shuffle(order)  # nobody is always first after a pause
            for name in order:
                times[name].append(_one_step(caches[name], config.sequences, round_))
            yield {}
        result: dict[str, Row] = {}
        for name, all_parts in times.items():
            parts = np.array(all_parts[WARM_UP:]) / 1e6
            grow, write, attend = parts.T
            result[name] = {
                "grow_us": float(grow.mean()) * 1e3,
                # The first quartile: on a shared machine slow rounds are somebody else's.
                "write_ms": float(np.percentile(write, 25)),
                "attend_ms": float(np.percentile(attend, 25)),
                "tpot_ms": float(np.percentile(parts.sum(axis=1), 25)),
                "tpot_p90_ms": float(np.percentile(parts.sum(axis=1), 90)),
            }
        yield result
    finally:
        for cache in caches.values():
            cache.close()


def _filled(name: str, lengths: list[int], config: Config) -> KVCache:
    """A cache with the sequences in it, its pages handed out in random order."""
    import torch

    spec = parse_spec(name, slots=False)
    longest = max(lengths) + config.rounds + WARM_UP
    room = sum(lengths) + len(lengths) * (config.rounds + WARM_UP + 512) + longest
    cache = spec.cache(LAYER, room * LAYER.bytes_per_token, device="cpu", layout="token-major")
    if spec.kind == "paged":
        _shuffle_pages(cache, spec.options["page_size"], config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    for seq, length in enumerate(lengths):
        cache.admit(seq, length, max_new=config.rounds + WARM_UP)
        kv = torch.randn(length, 8, 128, generator=generator)
        cache.write(0, [seq], kv, kv, lens=[length])
    return cache


def _shuffle_pages(cache: KVCache, page_size: int, seed: int) -> None:
    """Take every page and give them back in random order: they go out again in that order."""
    names = [("filler", i) for i in range(cache.capacity // page_size)]
    for name in names:
        cache.admit(name, page_size)
    Random(seed).shuffle(names)
    for name in names:
        cache.release(name)


def _one_step(cache: Any, num_seqs: int, seed: int) -> list[int]:
    """Nanoseconds of grow, write and attend."""
    import torch

    from ...kernels.attention import attend

    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_seqs, 32, 128, generator=generator)
    kv = torch.randn(num_seqs, 8, 128, generator=generator)
    seqs = list(range(num_seqs))
    stamps = [perf_counter_ns()]
    refused = cache.grow(seqs)
    stamps.append(perf_counter_ns())
    cache.write(0, seqs, kv, kv)
    stamps.append(perf_counter_ns())
    attend(q, cache.view(0, seqs))
    stamps.append(perf_counter_ns())
    assert not refused, "the cache was made too small"
    return [stop - start for start, stop in pairwise(stamps)]


def plot(rows: list[Row], out: Path) -> list[Path]:
    """Time per token, waste, tables and allocation over the block size, on one chart."""
    from matplotlib.figure import Figure

    from .. import style

    paged = [row for row in rows if row["backend"].startswith("paged")]
    blocks = [int(row["backend"].split(":")[1]) for row in paged]
    with style.applied():
        figure = Figure(figsize=(7.2, 6.4), layout="constrained")
        panels = figure.subplots(4, 1, sharex=True, height_ratios=(2, 1, 1, 1))
        for axes, (key, factor, label) in zip(
            panels,
            (
                ("tpot_ms", 1.0, "time per token, ms"),
                ("waste", 100.0, "waste, % of held"),
                ("table_bytes", 1 / 1024, "tables, KiB"),
                ("grow_us", 1.0, "grow, µs a step"),
            ),
            strict=True,
        ):
            values = [factor * row[key] for row in paged]
            blue = style.backend_style("paged:16").color
            axes.plot(blocks, values, marker="s", color=blue, clip_on=False, label="paged")
            best = values.index(min(values))
            axes.plot(
                blocks[best], values[best], "o", ms=11, mfc="none", color=style.INK, clip_on=False
            )
            axes.set_ylabel(label)
            lines = rows[len(paged) :] if key in ("tpot_ms", "grow_us") else []
            for row in reversed(lines):  # the solid line below the broken one: they may coincide
                look = style.backend_style(row["backend"])
                axes.axhline(row[key], color=look.color, ls=look.line, label=row["backend"])
            axes.set_ylim(0)
        panels[0].legend()
        panels[-1].set_xscale("log", base=2)
        panels[-1].set_xticks(blocks, [str(block) for block in blocks])
        panels[-1].set_xlabel("block size, tokens (ringed: the least)")
        style.heading(figure, "What the block size costs, measured on this CPU")
        return style.save(figure, out, "block-size")
