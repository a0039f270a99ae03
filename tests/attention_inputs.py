"""Random attention inputs whose every unreadable byte is poisoned, shared by the kernel tests."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvalloc.contract import DenseView, PagedView

UNDEFINED_ENTRIES = (-1, 2**31 - 1)
"""What table entries that hold no readable token are set to: reading through one is far out."""

LAYOUTS = ("token", "head", "interleaved")
"""Memory orders: ``[page, token, head, dim]``, ``[page, head, token, dim]``, and K beside V."""


@dataclass(frozen=True)
class AttentionCase:
    """The same tokens, twice: scattered over pages and in one dense buffer.

    ``q`` is ``[sum(q_lens), H_q, D]``; rows that no sequence may read are NaN, pages are in
    random order, undefined table entries are ``UNDEFINED_ENTRIES``.
    """

    q: torch.Tensor
    paged: PagedView
    dense: DenseView
    q_lens: list[int]


def attention_case(
    lengths: Sequence[int],
    *,
    q_lens: Sequence[int] | None = None,
    first: Sequence[int] | None = None,
    page_size: int = 16,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    layout: str = "token",
    seed: int = 0,
    device: str = "cpu",
) -> AttentionCase:
    """Draw a batch of sequences of ``lengths`` tokens, those before ``first`` dropped.

    ``q_lens`` defaults to one query each; ``layout`` is one of ``LAYOUTS``.
    """
    random = torch.Generator().manual_seed(seed)
    num_seqs = len(lengths)
    q_lens = [1] * num_seqs if q_lens is None else list(q_lens)
    first = [0] * num_seqs if first is None else list(first)
    kept = [n - f for n, f in zip(lengths, first, strict=True)]
    tokens = [
        torch.randn(2, n, kv_heads, head_dim, generator=random).to(dtype).to(device) for n in kept
    ]
    q = torch.randn(sum(q_lens), q_heads, head_dim, generator=random).to(dtype).to(device)
    shape = (kv_heads, head_dim)
    paged = _scatter(tokens, lengths, first, page_size, shape, layout, random, device)
    dense = _concatenate(tokens, shape, layout, random, device)
    return AttentionCase(q, paged, dense, q_lens)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """``max |out − expected| / max |expected|``; NaN anywhere makes it infinite."""
    if expected.numel() == 0:
        return 0.0
    error = (out.double().cpu() - expected.double().cpu()).abs().max()
    scale = expected.double().abs().max().cpu()
    if torch.isnan(error):
        return float("inf")
    return float(error / scale) if scale > 0 else float(error)


def sparse_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros that takes memory only where it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def _scatter(
    tokens: list[torch.Tensor],
    lengths: Sequence[int],
    first: Sequence[int],
    page_size: int,
    shape: tuple[int, int],
    layout: str,
    random: torch.Generator,
    device: str,
) -> PagedView:
    pages_of = [
        range(f // page_size, -(-n // page_size)) for n, f in zip(lengths, first, strict=True)
    ]
    num_pages = sum(len(pages) for pages in pages_of) + 3
    free = torch.randperm(num_pages, generator=random).tolist()
    k, v = _poisoned(num_pages, page_size, shape, layout, tokens, device)
    width = max((pages.stop for pages in pages_of), default=0) + 2
    table = torch.empty(len(lengths), width, dtype=torch.int32)
    table[:, 0::2], table[:, 1::2] = UNDEFINED_ENTRIES
    for i, pages in enumerate(pages_of):
        if lengths[i] == first[i]:
            continue
        for page in pages:
            table[i, page] = free.pop()
        at = torch.arange(first[i], lengths[i])
        page_ids = table[i, at // page_size].long().to(device)
        k[page_ids, (at % page_size).to(device)] = tokens[i][0]
        v[page_ids, (at % page_size).to(device)] = tokens[i][1]
    return PagedView(
        k,
        v,
        table.to(device),
        torch.tensor(list(first), dtype=torch.int32, device=device),
        torch.tensor(list(lengths), dtype=torch.int32, device=device),
    )


def _concatenate(
    tokens: list[torch.Tensor],
    shape: tuple[int, int],
    layout: str,
    random: torch.Generator,
    device: str,
) -> DenseView:
    gap = 3  # poisoned rows around every sequence
    starts = torch.zeros(len(tokens), dtype=torch.int64)
    at = gap
    for i in torch.randperm(len(tokens), generator=random).tolist():
        starts[i] = at
        at += tokens[i].shape[1] + gap
    k, v = (buffer[0] for buffer in _poisoned(1, at, shape, layout, tokens, device))
    for i, (keys, values) in enumerate(tokens):
        k[starts[i] : starts[i] + len(keys)] = keys
        v[starts[i] : starts[i] + len(values)] = values
    lengths = torch.tensor([pair.shape[1] for pair in tokens], dtype=torch.int32)
    return DenseView(k, v, starts.to(device), lengths.to(device))


def _poisoned(
    num_pages: int,
    page_size: int,
    shape: tuple[int, int],
    layout: str,
    tokens: list[torch.Tensor],
    device: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of ``[num_pages, page_size, H_kv, D]`` in the given memory order, all NaN."""
    dtype = tokens[0].dtype if tokens else torch.float32
    heads, dim = shape
    if layout == "token":
        buffer = torch.full((2, num_pages, page_size, heads, dim), torch.nan, dtype=dtype)
    elif layout == "head":
        buffer = torch.full((2, num_pages, heads, page_size, dim), torch.nan, dtype=dtype)
        buffer = buffer.transpose(2, 3)
    elif layout == "interleaved":
        buffer = torch.full((num_pages, page_size, 2, heads, dim), torch.nan, dtype=dtype)
        buffer = buffer.permute(2, 0, 1, 3, 4)
    else:
        raise ValueError(f"layout must be one of {LAYOUTS}, not {layout!r}")
    k, v = buffer.to(device)
    return k, v
