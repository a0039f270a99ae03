"""gpu-check, stage flash: the stock dense kernel over mapped rows, against float64, and in a graph.

What it must show: with ``seqused_k`` only the starts of ``cum_seq_k`` matter, so sequences may
lie anywhere and in any order, and nothing past a length is touched.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...contract import DenseView, KVCache
from .mapped import make_cache
from .stage import NotHere, StageReport, Target, require

if TYPE_CHECKING:
    import torch

    from ...contract import PagedView
    from ...vmm.cache import VmmKVCache

TOLERANCE = 1e-2  # of the largest expected value, in bfloat16
Q_HEADS = 32


def run(report: StageReport, target: Target) -> None:
    """Decode, prefill, windows, the arena, and growth between replays of a graph."""
    driver = target.driver()
    with report.check("decode over starts in any order, NaN past the ends"):
        with make_cache(driver) as cache:
            seqs = fill(cache, _lengths(cache))
            for order in _orders(seqs):
                compare(report, "decode", cache, order)
    with report.check("prefill, and several queries per sequence"):
        with make_cache(driver) as cache:
            seqs = fill(cache, _lengths(cache))
            for order in _orders(seqs):
                lengths = [cache.length(seq) for seq in order]
                compare(report, "prefill", cache, order, lengths)
                compare(report, "chunks", cache, order, [max(1, n // 3) for n in lengths])
    with report.check("a sliding window, whose pages are gone"):
        with make_cache(driver, window=40) as cache:
            unit = cache.prefix_index.unit_tokens
            seqs = fill(cache, [4 * unit, unit + 1])
            for seq in seqs:
                cache.grow([seq])
                store(cache, [seq], None)
            compare(report, "window", cache, seqs, window=40)
    with report.check("the contiguous arena"):
        _arena(report, target)
    with report.check("a CUDA graph captured once, replayed across growth"):
        _graph(report, driver, target)
    with report.check("everything is given back"):
        driver.close()
    worst = max((row["error"] for row in report.rows), default=float("nan"))
    report.headline = f"largest relative error {worst:.1e}"


def _lengths(cache: VmmKVCache) -> list[int]:
    unit = cache.prefix_index.unit_tokens
    return [1, unit - 1, unit, unit + 1, 2 * unit + 7, 15, 16, 17]


def _orders(seqs: list[str]) -> list[list[str]]:
    shuffled = random.Random(0).sample(seqs, len(seqs))
    return [seqs, seqs[::-1], shuffled, shuffled[:3]]


def fill(cache: KVCache, lengths: Sequence[int]) -> list[str]:
    """Admit sequences, poison their pages with NaN, and store random tokens."""
    from ...vmm.cache import VmmKVCache

    seqs = [f"s{i}" for i in range(len(lengths))]
    for seq, length in zip(seqs, lengths, strict=True):
        cache.admit(seq, length, max_new=64)
        if isinstance(cache, VmmKVCache):
            _poison(cache, seq)
        store(cache, [seq], [length])
    return seqs


def _poison(cache: VmmKVCache, seq: str) -> None:
    """Fill the pages of a sequence with NaN, past its end too."""
    unit = cache.prefix_index.unit_tokens
    for layer in range(len(cache.geometry.layers)):
        view = cache.view(layer, [seq])
        start, mapped = int(view.starts[0]), -(-cache.length(seq) // unit) * unit
        for tensor in (view.k, view.v):
            tensor[start : start + mapped] = float("nan")


def store(cache: KVCache, seqs: list[str], lens: list[int] | None) -> None:
    """Write random K and V in every layer."""
    num = len(seqs) if lens is None else sum(lens)
    for layer, shape in enumerate(cache.geometry.layers):
        k, v = (_random(cache, num, shape.kv_heads, shape.head_dim) for _ in range(2))
        cache.write(layer, seqs, k, v, lens=lens)


def _random(cache: KVCache, *shape: int) -> torch.Tensor:
    import torch

    dtype = getattr(torch, cache.geometry.dtype)
    return torch.randn(*shape, device=cache.device).to(dtype)


def compare(
    report: StageReport,
    name: str,
    cache: KVCache,
    seqs: list[str],
    q_lens: list[int] | None = None,
    window: int | None = None,
    tolerance: float = TOLERANCE,
) -> None:
    """``attend`` in the first layer against float64."""
    from ...kernels.attention import attend

    view = cache.view(0, seqs)
    q = _random(cache, sum(q_lens or [1] * len(seqs)), Q_HEADS, view.k.shape[-1])
    out = attend(q, view, q_lens=q_lens, window=window)
    error = relative_error(out, q, view, q_lens, window)
    report.add(case=name, sequences=len(seqs), queries=len(q), error=error)
    require(error <= tolerance, f"{name}: relative error {error:.1e}")


def relative_error(
    out: torch.Tensor,
    q: torch.Tensor,
    view: DenseView | PagedView,
    q_lens: list[int] | None = None,
    window: int | None = None,
) -> float:
    """Largest difference from float64 over the largest expected value; NaN if one is."""
    from ...kernels.reference import reference_attention

    expected = reference_attention(q, view, q_lens=q_lens, window=window)
    return float((out.double() - expected).abs().max() / expected.abs().max())


def _arena(report: StageReport, target: Target) -> None:
    from ...contiguous import ContiguousKVCache
    from ...geometry import KVGeometry

    geometry = KVGeometry.uniform("arena", layers=1, q_heads=Q_HEADS, kv_heads=8, head_dim=128)
    memory = 8192 * geometry.bytes_per_token
    for layout in ("token-major", "head-major"):
        with ContiguousKVCache(geometry, memory, device=target.device, layout=layout) as cache:
            seqs = fill(cache, [1, 300, 16, 777])
            for order in _orders(seqs):
                compare(report, f"arena {layout}", cache, order)


def flash_decode(
    q: torch.Tensor, view: DenseView, starts: torch.Tensor, rows: torch.Tensor, longest: int
) -> torch.Tensor:
    """One query per sequence through ``kernels.dense.flash``, at once: nothing is read back."""
    from ...kernels.dense import flash

    scale = q.shape[-1] ** -0.5
    return flash(q, view, starts, rows, 1, longest, scale=scale, window=view.window)


def decode_arguments(view: DenseView) -> tuple[torch.Tensor, torch.Tensor]:
    """``starts`` and ``rows`` of ``flash_decode``."""
    import torch

    starts = torch.empty(len(view.starts) + 1, dtype=torch.int32, device=view.k.device)
    starts[:-1] = view.starts
    starts[-1] = view.k.shape[0]
    rows = torch.arange(len(view.starts) + 1, dtype=torch.int32, device=view.k.device)
    return starts, rows


def _graph(report: StageReport, driver: Any, target: Target) -> None:
    """Addresses stay, so a recorded kernel sees what is mapped and written later."""
    if not target.is_gpu:
        raise NotHere("there are no graphs without a GPU")
    import torch

    with make_cache(driver) as cache:
        unit = cache.prefix_index.unit_tokens
        seqs = fill(cache, [unit - 24, unit, unit // 2])
        view = cache.view(0, seqs)
        lengths = view.lengths.clone()
        fixed = DenseView(view.k, view.v, view.starts.clone(), lengths)
        starts, rows = decode_arguments(fixed)
        q = _random(cache, len(seqs), Q_HEADS, 128)
        longest = cache.geometry.max_context or 0
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            flash_decode(q, fixed, starts, rows, longest)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flash_decode(q, fixed, starts, rows, longest)
        for step in range(4):
            lengths.copy_(cache.view(0, seqs).lengths)
            graph.replay()
            error = relative_error(out, q, fixed)
            report.add(case=f"graph, replay {step}", sequences=len(seqs), queries=3, error=error)
            require(error <= TOLERANCE, f"replay {step}: relative error {error:.1e}")
            require(not cache.grow(seqs, unit // 2), "growth was refused")
            store(cache, seqs, [unit // 2] * len(seqs))
        del view, fixed, graph
