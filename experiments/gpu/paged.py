"""gpu-check, stage paged: our Triton kernel with native bf16 products, against float64."""

from __future__ import annotations

from ...geometry import KVGeometry
from .flash import compare, fill
from .stage import StageReport, Target, require

PAGE_SIZES = (16, 1, 64, 256)
DTYPES = ("bfloat16", "float16", "float32")
WINDOW = 50
SHAPES = ((8, 128), (32, 64), (1, 256))
"""KV heads and head dim, for 32 query heads."""


def run(report: StageReport, target: Target) -> None:
    """Block sizes and dtypes, head shapes, and a context long enough to be split."""
    from ..bench.attention_points import TOLERANCE

    for dtype in DTYPES if target.is_gpu else DTYPES[:1]:
        for page_size in PAGE_SIZES if target.is_gpu else PAGE_SIZES[:2]:
            if report.seconds_left > 0 or page_size == PAGE_SIZES[0]:
                with report.check(f"{dtype}, pages of {page_size}"):
                    _compare(report, target, SHAPES[0], dtype, page_size, TOLERANCE[dtype])
    for kv_heads, head_dim in SHAPES[1:]:
        with report.check(f"{kv_heads} KV heads × {head_dim}"):
            _compare(report, target, (kv_heads, head_dim), DTYPES[0], 16, TOLERANCE[DTYPES[0]])
    with report.check("a long context, split"):
        num_tokens = 20_000 if target.is_gpu else 1_000
        geometry = _geometry(SHAPES[0], DTYPES[0])
        _decode(report, target, geometry, 16, [num_tokens, 3], TOLERANCE[DTYPES[0]])
    worst = max((row["error"] for row in report.rows), default=float("nan"))
    report.headline = f"{len(report.rows)} cases, largest relative error {worst:.1e}"


def _geometry(shape: tuple[int, int], dtype: str, window: int | None = None) -> KVGeometry:
    return KVGeometry.uniform(
        "paged",
        layers=1,
        q_heads=32,
        kv_heads=shape[0],
        head_dim=shape[1],
        dtype=dtype,
        window=window,
    )


def _decode(
    report: StageReport,
    target: Target,
    geometry: KVGeometry,
    page_size: int,
    lengths: list[int],
    tolerance: float,
) -> None:
    from ...paged import PagedKVCache

    tokens = sum(lengths) + (len(lengths) + 1) * max(page_size, 64)
    memory = tokens * geometry.bytes_per_token
    with PagedKVCache(geometry, memory, page_size, device=target.device) as cache:
        seqs = fill(cache, lengths)
        window = geometry.layers[0].window
        name = f"{geometry.dtype} {geometry.layers[0].head_dim} page {page_size}"
        for order in (seqs, seqs[::-1]):
            compare(report, f"{name} decode", cache, order, None, window, tolerance)
        ends = [cache.length(seq) for seq in seqs]
        chunks = [min(n, 40) for n in ends]
        compare(report, f"{name} chunks", cache, seqs, chunks, window, tolerance)
        cache.check_invariants()
        require(cache.usage().live > 0, "nothing was stored")


def _compare(
    report: StageReport,
    target: Target,
    shape: tuple[int, int],
    dtype: str,
    page_size: int,
    tolerance: float,
) -> None:
    lengths = [1, page_size - 1 or 1, page_size, page_size + 1, 130, 515]
    for window in (None, WINDOW):
        geometry = _geometry(shape, dtype, window)
        _decode(report, target, geometry, page_size, lengths, tolerance)
