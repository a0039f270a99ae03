"""gpu-check, stage attention: what the dense kernel pays on mapped memory, and kernels compared."""

from __future__ import annotations

import time
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ...contract import DenseView
from ...geometry import KVGeometry
from .flash import decode_arguments, flash_decode
from .stage import StageReport, Target, require

if TYPE_CHECKING:
    import torch

RATIO_ROUNDS = 15
CALLS = 10  # of a kernel between two looks at the clock
WORST_RATIO = 1.05


def run(report: StageReport, target: Target) -> None:
    """Mapped against plain memory first, then every kernel of ``bench attention``."""
    contexts = (1024, 8192, 32768) if target.is_gpu else (256,)
    with report.check("dense attention on mapped memory is as fast as on plain memory"):
        ratios = [_ratio(report, target, context) for context in contexts]
        # Small contexts measure launches; noise of a CPU is not what this is about.
        if target.is_gpu:
            require(ratios[-1] <= WORST_RATIO, f"it takes {ratios[-1]:.2f} times as long")
    report.headline = f"mapped / plain: {ratios[-1]:.3f}" if report.rows else ""
    for context, page_size in _points(target):
        if report.seconds_left > 0:
            with report.check(f"kernels at context {context}, blocks of {page_size}"):
                _kernels(report, target, context, page_size)


def _points(target: Target) -> list[tuple[int, int]]:
    if not target.is_gpu:
        return [(256, 16)]
    return [(8192, 16), (8192, 256), (8192, 64), (1024, 16), (32768, 16), (8192, 1)]


def _ratio(report: StageReport, target: Target, context: int) -> float:
    """Time over mapped rows by time over a plain tensor with the same tokens, in turns."""
    import torch

    from ...vmm.cache import VmmKVCache

    batch = max(1, (131_072 if target.is_gpu else 1024) // context)
    geometry = KVGeometry.uniform(
        "ratio", layers=1, q_heads=32, kv_heads=8, head_dim=128, max_context=context
    )
    memory = 2 * (batch + 1) * max(context * 2048, 2 << 20)
    seqs = list(range(batch))
    with VmmKVCache(geometry, memory, 2 << 20, device=target.device, max_rows=batch) as cache:
        for seq in seqs:
            cache.admit(seq, context)
            k, v = (_random(target, context, 8, 128) for _ in range(2))
            cache.write(0, [seq], k, v, lens=[context])
        mapped = cache.view(0, seqs)
        spans = [range(start, start + context) for start in mapped.starts.tolist()]
        plain_k, plain_v = (
            torch.cat([tensor[span.start : span.stop] for span in spans])
            for tensor in (mapped.k, mapped.v)
        )
        starts = torch.arange(batch, dtype=torch.int64, device=target.device) * context
        plain = DenseView(plain_k, plain_v, starts, mapped.lengths)
        q = _random(target, batch, 32, 128)
        times: dict[str, list[float]] = {"mapped": [], "plain": []}
        pair = {"mapped": mapped, "plain": plain}
        for round_ in range(-2, RATIO_ROUNDS):  # two rounds warm up
            for name in list(pair)[:: 1 if round_ % 2 else -1]:
                ms = _milliseconds(target, q, pair[name], context)
                if round_ >= 0:
                    times[name].append(ms)
        del mapped, pair
    ratio = median(times["mapped"]) / median(times["plain"])
    num_bytes = 2 * batch * context * 2048
    for name, durations in times.items():
        ms = median(durations)
        report.add(
            memory=name, context=context, batch=batch, ms=ms, gbps=num_bytes / ms / 1e6, ratio=ratio
        )
    return ratio


def _random(target: Target, *shape: int) -> torch.Tensor:
    import torch

    return torch.randn(*shape, device=target.device).to(torch.bfloat16)


def _milliseconds(target: Target, q: torch.Tensor, view: DenseView, context: int) -> float:
    """Of one call, from a queue of ``CALLS``; on the device's clock where it has one."""
    import torch

    if not target.is_gpu:
        from ...kernels.attention import attend

        begin = time.perf_counter()
        attend(q, view)
        return (time.perf_counter() - begin) * 1e3
    arguments = decode_arguments(view)
    start, stop = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    start.record()
    for _ in range(CALLS):
        flash_decode(q, view, *arguments, context)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / CALLS


def _kernels(report: StageReport, target: Target, context: int, page_size: int) -> None:
    """The rounds of ``bench attention``, which judge the outputs, at one point."""
    from ..bench.attention_points import Point, candidates
    from ..bench.attention_rounds import measure

    tokens = 131_072 if target.is_gpu else 1024
    # As bench.attention.Config, whose module needs the command line's libraries.
    config: Any = SimpleNamespace(
        tokens=tokens,
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        device=target.device.type,
        rounds=15 if target.is_gpu else 1,
        seed=0,
    )
    point = Point(page_size, context, tokens // context)
    for row in measure(config, point, *candidates(config, point)):
        report.add(**row)
