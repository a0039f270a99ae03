"""How many prompt tokens are found in memory, and how much memory sharing saves, by page size?

Conversations of Mooncake's service (prompts told as runs of 512 tokens), on the books of
Llama-3.1-8B. Only full pages are shared, so that a page that is larger than what is common finds
less; pages that nobody holds are kept until the memory is needed, longest unused first. The
mapped backend shares by mapping one physical page at two rows.

Refuted if hits did not fall with the page size beyond the run of 512 tokens, or if mapped and
paged backends of equal pages found different tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...contract import Allocator
from ...models import geometry
from ..output import parse_bytes
from ..recorded_traces import recorded
from ..registry import Report
from ..replay import replay
from ..row_tables import Column, Columns, Row, percent, size
from ..scheduling import Placed
from ..specs import parse_spec

SIMULATED = False
COLUMNS: Columns = (
    Column("memory", "memory_bytes", size),
    Column("backend", "backend"),
    Column("tokens/page", "page_tokens"),
    Column("hits / prompt tokens", "hits", percent),
    Column("memory saved", "saved", percent),
    Column("preemptions", "preemptions"),
    Column("steps", "steps"),
)


@dataclass(frozen=True)
class Config:
    """Backends, memory sizes, and how much of the trace (a generated kind without it)."""

    backends: tuple[str, ...] = (
        "paged:16",
        "paged:128",
        "paged:512",
        "paged:1024",
        "paged:2048",
        "vmm:64KiB",
        "vmm:2MiB",
    )
    memories: tuple[str, ...] = ("64GiB", "4TiB")
    model: str = "llama-3.1-8b"
    file: str = "mooncake_conversation_first5000.jsonl"
    requests: int = 2_000


CONFIG = Config()
QUICK = Config(backends=("paged:32", "paged:256", "vmm:64KiB"), memories=("256GiB",), requests=60)


class Lengths:
    """Sums the tokens that running sequences would hold if none were shared."""

    def __init__(self, allocator: Allocator) -> None:
        self.unshared_tokens = self.live_tokens = 0
        self._allocator = allocator

    def begin_step(self, arrivals: range) -> None:
        """Only decode steps count."""

    def prefill(self, placed: list[Placed]) -> None:
        """Nothing is computed here."""

    def decode(self, requests: list[int]) -> None:
        """Book a step."""
        self.unshared_tokens += sum(map(self._allocator.length, requests))
        usage = self._allocator.usage()
        self.live_tokens += usage.live // self._allocator.geometry.bytes_per_token


def run(config: Config, report: Report) -> list[Row]:
    """One row per memory size and backend; saved: over the steps, of what no sharing would hold."""
    trace = recorded(config.file, "shared-prefix", config.requests, report).with_max_new(None)
    model = geometry(config.model)
    rows: list[Row] = []
    total = len(config.memories) * len(config.backends)
    for memory in config.memories:
        for name in config.backends:
            report.progress(len(rows), total)
            allocator = parse_spec(name, slots=False).allocator(model, parse_bytes(memory))
            lengths = Lengths(allocator)
            outcome = replay(trace, allocator, engine=lengths)
            rows.append(
                {
                    "memory_bytes": parse_bytes(memory),
                    "backend": name,
                    "page_tokens": _page_tokens(name, model.tensor_bytes(0)),
                    "hits": outcome.counts.hit_tokens / int(trace.prompt.sum()),
                    "hit_tokens": outcome.counts.hit_tokens,
                    "saved": 1 - lengths.live_tokens / lengths.unshared_tokens,
                    "preemptions": outcome.counts.preemptions,
                    "completed": outcome.counts.completed,
                    "steps": outcome.recorder.num_steps,
                    "trace": trace.name,
                }
            )
    return rows


def _page_tokens(name: str, tensor_bytes: int) -> int:
    """Tokens of one page of per-layer buffers."""
    options = parse_spec(name, slots=False).options
    return int(options.get("page_size") or options["page_bytes"] // tensor_bytes)


def plot(rows: list[Row], out: Path) -> list[Path]:
    """Hits and saved memory over the page size, one panel per memory size."""
    from .. import style
    from ..output import format_bytes

    memories = list(dict.fromkeys(row["memory_bytes"] for row in rows))
    with style.applied():
        figure, panels = style.panels(len(memories), height=2.6)
        for axes, memory in zip(panels, memories, strict=True):
            for family, key, label in (
                ("paged", "hits", "paged: hits"),
                ("vmm", "hits", "mapped: hits"),
                ("paged", "saved", "paged: memory saved"),
            ):
                mine = [
                    (row["page_tokens"], 100 * row[key])
                    for row in rows
                    if row["memory_bytes"] == memory and row["backend"].startswith(family)
                ]
                look = style.backend_style(f"{family}:16")
                color = look.color if key == "hits" else style.FAINT
                line = "^" if family == "vmm" else "s-" if key == "hits" else "x:"
                axes.plot(*zip(*mine, strict=True), line, color=color, label=label)
            axes.set_xscale("log", base=2)
            ticks = sorted({row["page_tokens"] for row in rows if "paged" in row["backend"]})
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            style.title(axes, format_bytes(memory), "")
            axes.set_xlabel("tokens per page")
        panels[0].set_ylim(0)  # shared, and so only once everything is drawn
        panels[0].set_ylabel("% of prompt tokens, of memory")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        style.heading(figure, f"Shared prefixes · trace {rows[0]['trace']}")
        return style.save(figure, out, "prefix")
