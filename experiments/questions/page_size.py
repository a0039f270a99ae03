"""What do larger physical pages cost: tokens in a page, and requests that fit?

vAttention's tables (Prabhu et al., ASPLOS 2025), by formula and by accounting. A page holds
page bytes / (KV heads × head dim × bytes) tokens of one K or V tensor of one layer; interleaving
the layers divides that by 2 × layers. The batch is the mean number of running requests while
more wait, with lengths drawn uniformly around a mean that we chose (the paper's are not known
here), on GPUs of 80 GB of which 90 % hold the weights and the cache.

Refuted if the batch did not shrink with the page under per-layer buffers by about
length / (length + half a page), or if interleaving did not make the page size irrelevant.

Printed in the paper and not reproduced: 32 and 1,024 tokens for Yi-34B on two GPUs, where 8 KV
heads over two GPUs give 64 and 2,048 (32 and 1,024 are one GPU's); and the absolute batches,
which hang on its requests. The ratio of the batches is what can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...geometry import KVGeometry
from ..generators import generate
from ..output import format_bytes, parse_bytes
from ..registry import Report
from ..row_tables import Column, Columns, Row, percent, size
from ..saturated import Shares, drain
from ..specs import parse_spec
from ..step_model import step_model

SIMULATED = False
GPU = "A100-80GB"
PRINTED_TOKENS = {
    ("Yi-6B", 64): 64, ("Yi-6B", 2048): 2048,
    ("Llama-3-8B / 2", 64): 64, ("Llama-3-8B / 2", 2048): 2048,
    ("Yi-34B / 2", 64): 32, ("Yi-34B / 2", 2048): 1024,
}  # fmt: skip
PRINTED_BATCH = {
    ("Yi-6B", 64): 240, ("Yi-6B", 2048): 187,
    ("Llama-3-8B / 2", 64): 258, ("Llama-3-8B / 2", 2048): 203,
    ("Yi-34B / 2", 64): 68, ("Yi-34B / 2", 2048): 56,
}  # fmt: skip
COLUMNS: Columns = (
    Column("model", "model"),
    Column("page", "page_bytes", size),
    Column("tokens/page", "tokens_per_page"),
    Column("printed", "printed_tokens"),
    Column("batch", "batch"),
    Column("of 64 KiB", "ratio", percent),
    Column("printed batch", "printed_batch"),
    Column("of 64 KiB", "printed_ratio", percent),
    Column("interleaved: tokens/page", "interleaved_tokens"),
    Column("batch", "interleaved_batch"),
)


@dataclass(frozen=True)
class Config:
    """Models as (name, GPUs), page sizes, and requests of prompt ± half and output ± half."""

    models: tuple[tuple[str, int], ...] = (("yi-6b", 1), ("llama-3-8b", 2), ("yi-34b", 2))
    pages: tuple[str, ...] = ("64KiB", "128KiB", "256KiB", "2MiB")
    requests: int = 600
    prompt: int = 3_400
    output: int = 400
    seed: int = 0


CONFIG = Config()
QUICK = Config(models=(("yi-34b", 2),), pages=("64KiB", "2MiB"), requests=100)


def run(config: Config, report: Report) -> list[Row]:
    """One row per model and page size."""
    rows: list[Row] = []
    total = len(config.models) * len(config.pages)
    for name, tp in config.models:
        model = step_model(name, GPU, tp)
        shard, memory = model.shard, model.cache_bytes
        first: float | None = None
        for page in config.pages:
            report.progress(len(rows), total)
            page_bytes = parse_bytes(page)
            batch = _batch(shard, memory, f"vmm:{page}", config)
            first = first or batch
            key, small = (shard.name, page_bytes >> 10), (shard.name, 64)
            printed = PRINTED_BATCH.get(key)
            rows.append(
                {
                    "model": shard.name,
                    "page_bytes": page_bytes,
                    "tokens_per_page": page_bytes / shard.tensor_bytes(0),
                    "printed_tokens": PRINTED_TOKENS.get(key),
                    "batch": batch,
                    "ratio": batch / first,
                    "printed_batch": printed,
                    "printed_ratio": printed / PRINTED_BATCH[small] if printed else None,
                    "interleaved_tokens": page_bytes / shard.bytes_per_token,
                    "interleaved_batch": _batch(shard, memory, f"vmm:{page}:interleaved", config),
                    "memory_bytes": memory,
                }
            )
    return rows


def _batch(shard: KVGeometry, memory: int, spec: str, config: Config) -> float:
    trace = generate(
        "uniform",
        requests=config.requests,
        seed=config.seed,
        rate=0,
        prompt=(config.prompt // 2, config.prompt * 3 // 2),
        output=(config.output // 2, config.output * 3 // 2),
    ).with_max_new("output")
    # The context limits of the first weights are shorter than the requests; theirs was 200K.
    allocator = parse_spec(spec, slots=False).allocator(shard, memory, limit=1 << 20)
    shares = Shares(trace, allocator)
    for scheduler in drain(trace, allocator):
        shares.sample(scheduler)
        if not scheduler.waiting:
            break
    return shares.mean()["running"]


def plot(rows: list[Row], out: Path) -> list[Path]:
    """Batch over page size, per-layer buffers against interleaved layers."""
    from .. import style

    models = list(dict.fromkeys(row["model"] for row in rows))
    with style.applied():
        figure, panels = style.panels(len(models), height=2.3)
        for axes, model in zip(panels, models, strict=True):
            mine = [row for row in rows if row["model"] == model]
            x = [row["page_bytes"] for row in mine]
            color = style.backend_style("vmm:2MiB").color
            axes.plot(x, [r["batch"] for r in mine], "-^", color=color, label="per layer")
            axes.plot(x, [r["interleaved_batch"] for r in mine], "--o", color=style.FAINT,
                      label="layers interleaved")  # fmt: skip
            printed = [(r["page_bytes"], r["printed_batch"]) for r in mine if r["printed_batch"]]
            axes.plot(*zip(*printed, strict=True), "x", color=style.INK, label="printed")
            axes.set_xscale("log", base=2)
            axes.set_xticks(x, [format_bytes(value) for value in x], rotation=30)
            axes.minorticks_off()
            style.title(axes, model, "")
        panels[0].set_ylim(0)  # shared, and so only once everything is drawn
        panels[0].set_ylabel("running requests")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        style.heading(figure, "Requests that fit, by page size (vAttention's table)")
        return style.save(figure, out, "page-size")
