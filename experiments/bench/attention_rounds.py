"""Rounds of ``bench attention``: everything takes its turn in each, in shuffled order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING

import torch

from ...geometry import ITEMSIZE
from .attention_points import TOLERANCE, Candidate, Point, error

if TYPE_CHECKING:  # gpu-check comes here where the libraries of the command line are missing
    from ..row_tables import Row
    from .attention import Config

DENSE = ("dense-sdpa", "dense-fa2")


def kv_bytes(config: Config) -> int:
    """Bytes of K and V that each call must read."""
    return 2 * config.tokens * config.kv_heads * config.head_dim * ITEMSIZE[config.dtype]


def measure(
    config: Config, point: Point, kernels: list[Candidate], limits: list[Candidate]
) -> list[Row]:
    """Rows of one point, for ``attention.run``."""
    first = {each: each.call() for each in kernels}  # compiles, too
    errors = {each: error(each, out) for each, out in first.items()}
    times: dict[Candidate, list[float]] = {each: [] for each in (*kernels, *limits)}
    order, shuffle = list(times), random.Random(config.seed)
    for _ in range(config.rounds):
        shuffle.shuffle(order)
        for each in order:
            out, ms = timed(each.call, config.device)
            times[each].append(ms)
            if each in first:
                errors[each] = max(errors[each], _difference(out, first[each]))
                # The next output may get this memory: rows left unwritten must show.
                out.fill_(float("nan"))
    for each, value in errors.items():
        if not value <= TOLERANCE[config.dtype]:
            raise RuntimeError(f"{each.kernel}, {each.layout}: relative error {value:.1e}")
    total, dense = kv_bytes(config), [each for each in kernels if each.kernel in DENSE]
    copy, read = (median(times[each]) for each in limits)
    best = min((median(times[each]) for each in dense), default=None)
    shape = {key: getattr(config, key) for key in ("q_heads", "kv_heads", "head_dim", "dtype")}
    rows = []
    for each in kernels:
        ms = median(times[each])
        rows.append(
            {
                "kernel": each.kernel,
                "layout": each.layout,
                **asdict(point),
                **shape,
                "ms": ms,
                "gbps": total / ms / 1e6,
                "of_copy_bandwidth": copy / ms,
                "of_read_bandwidth": read / ms,
                "vs_dense": ms / best if best else None,
                "error": errors[each],
            }
        )
    return rows


def _difference(out: torch.Tensor, first: torch.Tensor) -> float:
    """Relative, infinite where something is not a number."""
    share = float((out - first).abs().max() / first.abs().max())
    return share if share == share else float("inf")


def timed(call: Callable[[], torch.Tensor], device: str) -> tuple[torch.Tensor, float]:
    """The output of a call and its milliseconds, on the device's own clock where it has one."""
    if device == "cpu":
        begin = time.perf_counter()
        return call(), (time.perf_counter() - begin) * 1e3
    start, stop = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    torch.cuda.synchronize()
    start.record()
    out = call()
    stop.record()
    stop.synchronize()
    return out, start.elapsed_time(stop)
