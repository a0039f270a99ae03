"""Paged attention on a CUDA device: how the Triton kernels are launched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton

from ..contract import PagedView
from .triton_kernels import attend_pages, combine_splits
from .triton_tiles import (
    MAX_HEAD_DIM,
    MAX_SPLITS,
    MIN_SPLIT_TOKENS,
    Variant,
    ceil_div,
    choose_splits,
)

INTERPRETED = not isinstance(attend_pages, triton.JITFunction)
"""TRITON_INTERPRET=1 was set when triton was imported: CPU tensors are taken, slowly."""


def paged_attention(
    q: torch.Tensor,
    view: PagedView,
    *,
    q_lens: Sequence[int] | torch.Tensor,
    scale: float,
    window: int | None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Causal attention of packed queries over pages, without a host synchronisation.

    Parameters
    ----------
    q
        ``[T_q, H_q, D]``, packed in the order of the view; dtype and device of its tensors.
    view
        One layer of a batch. Table entries without a readable token are not read.
    q_lens
        Query tokens of each sequence, ``[S]``, on the host: query ``i`` of a sequence of
        ``n`` queries and ``L`` tokens sits at position ``L − n + i``.
    scale
        Factor of the scores.
    window
        Each query sees the last ``window`` tokens, itself included; None means all.
    num_splits
        Shares that each context is cut into, up to ``MAX_SPLITS``; None lets the size of
        the device decide. The last bits of the result depend on it.

    Returns
    -------
    torch.Tensor
        ``[T_q, H_q, D]``, contiguous; 0 where a query sees no token.

    Raises
    ------
    ValueError
        CPU tensors without the interpreter, a head dim above 256, or ``num_splits`` out of
        range. Shapes and lengths are checked by ``attend``, not here.
    """
    _check(q, num_splits)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    lens: list[int] = q_lens.tolist() if isinstance(q_lens, torch.Tensor) else list(q_lens)
    variant, num_splits, min_share = _plan(q, view, lens, window, num_splits)
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        _launch(out, q, view, lens, variant, scale, window or 0, num_splits, min_share)
    return out


def _plan(
    q: torch.Tensor, view: PagedView, lens: list[int], window: int | None, num_splits: int | None
) -> tuple[Variant, int, int]:
    """What is launched, into how many shares contexts are cut, and their least size in tiles."""
    _, page_size, num_kv_heads, head_dim = view.k.shape
    variant = Variant(
        arch=_arch(q.device),
        dtype=str(q.dtype).removeprefix("torch."),
        head_dim=head_dim,
        page_size=page_size,
        group=q.shape[1] // num_kv_heads,
        longest_q=max(lens),
        ragged=min(lens) != max(lens),
        windowed=window is not None,
    )
    min_share = 1
    if num_splits is None:
        num_tiles = sum(ceil_div(n * variant.group, variant.tiles.block_m) for n in lens)
        longest = view.block_table.shape[1] * page_size
        if window is not None:
            longest = min(longest, window + max(lens) - 1)
        num_splits = choose_splits(num_tiles * num_kv_heads, longest, _num_processors(q.device))
        # The lengths are on the device: a sequence much shorter than the table takes fewer.
        min_share = ceil_div(MIN_SPLIT_TOKENS, variant.tiles.block_n)
    return replace(variant, split=num_splits > 1), num_splits, min_share


def _launch(
    out: torch.Tensor,
    q: torch.Tensor,
    view: PagedView,
    lens: list[int],
    variant: Variant,
    scale: float,
    window: int,
    num_splits: int,
    min_share: int,
) -> None:
    num_kv_heads = view.k.shape[2]
    tiles_per_seq = ceil_div(variant.longest_q * variant.group, variant.tiles.block_m)
    num_tiles, tiles = len(lens) * tiles_per_seq, None
    if variant.ragged:
        tiles = _tile_table(lens, variant.group, variant.tiles.block_m, q.device)
        num_tiles = len(tiles)
    partial = partial_lse = None
    if variant.split:
        shape = (*q.shape[:2], num_splits)
        partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        partial = torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=q.device)
    q = q if q.stride(2) == 1 else q.contiguous()
    table = view.block_table if view.block_table.stride(1) == 1 else view.block_table.contiguous()
    # Checkers take the kernels for plain functions.
    attend: Any = attend_pages[num_tiles, num_kv_heads, num_splits]
    attend(
        out,
        partial,
        partial_lse,
        q,
        view.k,
        view.v,
        table,
        view.first.contiguous(),
        view.lengths.contiguous(),
        tiles,
        scale * math.log2(math.e),
        min(window, 2**31 - 1),
        variant.longest_q,
        tiles_per_seq,
        num_splits,
        min_share,
        *q.stride()[:2],
        *view.k.stride()[:3],
        *view.v.stride()[:3],
        table.stride(0),
        **variant.constants(upcast=INTERPRETED),
        **variant.options(),
    )
    if variant.split:
        combine: Any = combine_splits[(q.shape[0] * q.shape[1],)]
        options = variant.combine_options()
        combine(out, partial, partial_lse, num_splits, **variant.combine_constants(), **options)


def _tile_table(lens: list[int], group: int, block_m: int, device: torch.device) -> torch.Tensor:
    """Int32 ``[num_tiles, 4]``: sequence, first row, first query token, query tokens."""
    tiles = []
    q_start = 0
    for seq, q_len in enumerate(lens):
        # As in the uniform case, the tiles that see the most keys come first.
        for row in reversed(range(0, q_len * group, block_m)):
            tiles.append((seq, row, q_start, q_len))
        q_start += q_len
    table = torch.tensor(tiles, dtype=torch.int32, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


def _check(q: torch.Tensor, num_splits: int | None) -> None:
    if not (q.is_cuda or INTERPRETED):
        raise ValueError(
            "the Triton kernel needs CUDA tensors; for CPU tensors call attend, which takes the "
            "Numba kernel, or set TRITON_INTERPRET=1 before triton is imported"
        )
    if q.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(f"head dim must be at most {MAX_HEAD_DIM}, not {q.shape[-1]}")
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits must be from 1 to {MAX_SPLITS}, not {num_splits}")


@cache
def _arch(device: torch.device) -> int:
    """Compute capability × 10; the interpreter computes as Hopper would."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
