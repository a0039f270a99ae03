"""What ``bench attention`` times: the same tokens in every layout, poison around them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...contract import DenseView, PagedView
from ...tensors import LAYOUTS

if TYPE_CHECKING:
    from .attention import Config

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
"""Largest relative error by dtype, of the dtypes that have a kernel."""
SPARE = 16
"""Poisoned tokens or pages beside the stored ones."""


@dataclass(frozen=True)
class Point:
    """What one group of rows has in common."""

    page_size: int
    context: int
    batch: int


class Candidate(NamedTuple):
    """A kernel on a layout: call it and get the output."""

    kernel: str
    layout: str
    call: Callable[[], torch.Tensor]


def candidates(config: Config, point: Point) -> tuple[list[Candidate], list[Candidate]]:
    """Kernels to time, and what the memory can do at most: a copy and a plain read.

    All kernels see the same tokens; each has its own copy of them, so that none warms the
    cache for another.
    """
    dtype = getattr(torch, config.dtype)
    random = torch.Generator().manual_seed(config.seed)
    shape = (point.batch * point.context, config.kv_heads, config.head_dim)
    k, v = (torch.randn(shape, generator=random).to(dtype) for _ in range(2))
    q = torch.randn(point.batch, config.q_heads, config.head_dim, generator=random)
    q = q.to(config.device, dtype)
    order = torch.randperm(point.batch * -(-point.context // point.page_size), generator=random)
    kernels: list[Candidate] = []
    for layout in LAYOUTS:
        dense = _dense_view(k, v, point, layout, config.device)
        paged = _paged_view(k, v, point, order, layout, config.device)
        kernels += _kernels(q, dense, paged, layout)
    memory = torch.empty(2, *shape, dtype=dtype, device=config.device).view(torch.float32)
    memory.zero_()
    limits = [
        Candidate("copy", "", lambda: memory[0].copy_(memory[1])),
        Candidate("read", "", memory.sum),
    ]
    return kernels, limits


def _kernels(q: torch.Tensor, dense: DenseView, paged: PagedView, layout: str) -> list[Candidate]:
    from ...kernels import dense as stock
    from ...kernels import gather, torch_varlen

    arguments: dict[str, Any] = {
        "q_lens": [1] * len(q),
        "scale": 1 / math.sqrt(q.shape[-1]),
        "window": None,
    }
    found: list[tuple[str, Any, DenseView | PagedView]] = []
    if q.device.type == "cpu":
        from ...kernels import paged_numba

        found.append(("dense-sdpa", stock.dense_attention, dense))
        found.append(("paged-numba", paged_numba.paged_attention, paged))
        found.append(("gather-sdpa", gather.paged_attention, paged))
    else:
        from ...kernels import paged_triton

        found.append(("paged-triton", paged_triton.paged_attention, paged))
        if q.dtype != torch.float32:  # FlashAttention-2 does not take it
            found.append(("dense-fa2", stock.dense_attention, dense))
            found.append(("gather-fa2", gather.paged_attention, paged))
        if torch_varlen.fits(paged):
            found.append(("torch-varlen-paged", torch_varlen.paged_attention, paged))
    return [
        Candidate(name, layout, partial(function, q, view, **arguments))
        for name, function, view in found
    ]


def error(candidate: Candidate, out: torch.Tensor) -> float:
    """Relative error of the first and the last sequence against float64."""
    from ...kernels.reference import reference_attention

    assert isinstance(candidate.call, partial)
    q, view = candidate.call.args
    ends = [0, len(q) - 1]
    if isinstance(view, DenseView):
        view = DenseView(view.k, view.v, view.starts[ends], view.lengths[ends])
    else:
        view = PagedView(
            view.k, view.v, view.block_table[ends], view.first[ends], view.lengths[ends]
        )
    expected = reference_attention(q[ends], view)
    return float((out[ends] - expected).abs().max() / expected.abs().max())


def _dense_view(
    k: torch.Tensor, v: torch.Tensor, point: Point, layout: str, device: str
) -> DenseView:
    """Sequences one after the other, poison between them."""
    row = point.context + SPARE
    shape = (point.batch, point.context, *k.shape[1:])

    def store(tokens: torch.Tensor) -> torch.Tensor:
        buffer = _poisoned((point.batch * row, *k.shape[1:]), layout, k.dtype, device)
        for i, sequence in enumerate(tokens.view(shape)):
            buffer[i * row : i * row + point.context] = sequence.to(device)
        return buffer

    starts = torch.arange(point.batch, dtype=torch.int64) * row
    lengths = torch.full((point.batch,), point.context, dtype=torch.int32)
    return DenseView(
        store(k), store(v), starts.to(device), lengths.to(device), longest=point.context
    )


def _paged_view(
    k: torch.Tensor, v: torch.Tensor, point: Point, order: torch.Tensor, layout: str, device: str
) -> PagedView:
    """Pages in random order, poison in the unfilled ends and in spare pages."""
    size, per_seq = point.page_size, len(order) // point.batch
    shape = (point.batch, point.context, *k.shape[1:])

    def store(tokens: torch.Tensor) -> torch.Tensor:
        pool = _poisoned((len(order) + SPARE, size, *k.shape[1:]), layout, k.dtype, device)
        for page, part in enumerate(torch.split(tokens.view(shape), size, dim=1)):
            pool[order[page::per_seq], : part.shape[1]] = part.to(device)
        return pool

    table = order.to(torch.int32).view(point.batch, per_seq)
    zeros = torch.zeros(point.batch, dtype=torch.int32)
    lengths = torch.full((point.batch,), point.context, dtype=torch.int32)
    return PagedView(store(k), store(v), table.to(device), zeros.to(device), lengths.to(device))


def _poisoned(shape: tuple[int, ...], layout: str, dtype: torch.dtype, device: str) -> torch.Tensor:
    """NaN everywhere, ``[…, tokens, heads, dim]`` in the given memory order."""
    if layout == "head-major":
        *outer, tokens, heads, dim = shape
        shape = (*outer, heads, tokens, dim)
    memory = torch.full(shape, torch.nan, dtype=dtype, device=device)
    return memory.transpose(-3, -2) if layout == "head-major" else memory
