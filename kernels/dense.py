"""Attention over consecutive addresses by stock kernels: nothing here is our own arithmetic."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..contract import DenseView

QUERY_BLOCK = 256
"""Queries per call where a mask is needed: bounds the mask to this many rows."""


def dense_attention(
    q: torch.Tensor, view: DenseView, *, q_lens: list[int], scale: float, window: int | None
) -> torch.Tensor:
    """Attend through a dense view; arguments as checked by ``attention.attend``."""
    if q.device.type == "cuda":
        return _flash_attention(q, view, q_lens, scale, window)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    row = 0
    starts, lengths = view.starts.tolist(), view.lengths.tolist()
    for start, length, num_queries in zip(starts, lengths, q_lens, strict=True):
        rows = slice(row, row + num_queries)
        row += num_queries
        if num_queries == 0:
            continue
        if length == 0:
            out[rows] = 0
            continue
        # Only rows of this sequence: what lies beyond may be unmapped.
        k = view.k[start : start + length]
        v = view.v[start : start + length]
        _attend_one_sequence(q[rows], k, v, out[rows], scale, window)
    return out


def _attend_one_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int | None,
) -> None:
    """``q`` ``[n, H_q, D]`` over ``k``, ``v`` ``[L, H_kv, D]`` into ``out``; ``n <= L``."""
    num_queries, num_heads, dim = q.shape
    length, kv_heads = k.shape[:2]
    grouped = (num_queries, kv_heads, num_heads // kv_heads, dim)
    q, out = q.view(grouped) if q.is_contiguous() else q.reshape(grouped), out.view(grouped)
    if num_queries == 1:
        # The query group as rows of one small matrix: each K and V row is read once per group.
        begin = 0 if window is None else max(0, length - window)
        out[0] = scaled_dot_product_attention(
            q, k[begin:].transpose(0, 1)[None], v[begin:].transpose(0, 1)[None], scale=scale
        )[0]
        return
    # KV heads are the batch and the group is an expanded head axis: no copy of K or V.
    rows = q.permute(1, 2, 0, 3)
    keys, values = (
        tensor.transpose(0, 1)[:, None].expand(-1, grouped[2], -1, -1) for tensor in (k, v)
    )
    if num_queries == length and (window is None or window >= length):
        result = scaled_dot_product_attention(rows, keys, values, is_causal=True, scale=scale)
        out.copy_(result.permute(2, 0, 1, 3))
        return
    for begin in range(0, num_queries, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, num_queries)
        # `is_causal` is aligned top-left in SDPA, hence a mask; it spans visible tokens only.
        at = length - num_queries + begin
        low = 0 if window is None else max(0, at - window + 1)
        high = length - num_queries + end
        mask = torch.ones(end - begin, high - low, dtype=torch.bool).tril(at - low)
        if window is not None:
            mask = mask.triu(at - low - window + 1)
        result = scaled_dot_product_attention(
            rows[:, :, begin:end],
            keys[:, :, low:high],
            values[:, :, low:high],
            attn_mask=mask,
            scale=scale,
        )
        out[begin:end] = result.permute(2, 0, 1, 3)


def _flash_attention(
    q: torch.Tensor, view: DenseView, q_lens: list[int], scale: float, window: int | None
) -> torch.Tensor:
    """Make the arguments of ``flash``; waits if the view does not know its longest."""
    _check_flash_limits(q, view)
    longest = int(view.lengths.max()) if view.longest is None else view.longest
    starts = torch.empty(len(q_lens) + 1, dtype=torch.int32, device=q.device)
    starts[:-1] = view.starts
    starts[-1] = view.k.shape[0]
    rows = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = view.lengths.to(q.device, non_blocking=True)
    view = DenseView(view.k, view.v, view.starts, lengths)
    rows = rows.to(q.device, non_blocking=True)
    return flash(q, view, starts, rows, max(q_lens), longest, scale=scale, window=window)


def flash(
    q: torch.Tensor,
    view: DenseView,
    starts: torch.Tensor,
    rows: torch.Tensor,
    most_queries: int,
    longest: int,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """FlashAttention-2 as bundled with torch 2.11 … 2.14. Written by source, not yet run on a GPU.

    The starts of the sequences in the big buffer go in as ``cum_seq_k`` and their lengths as
    ``seqused_k``: then only the starts matter, so one call serves the arena and the mapped
    range, and no row past a length is touched. All tensors are on the device, so nothing waits
    for it, and a CUDA graph can record the call.

    Parameters
    ----------
    q
        ``[sum of queries, H_q, D]``.
    starts, rows
        int32 ``[S + 1]``: ``view.starts`` and the buffer's length; where each sequence's queries
        begin in ``q``, and their number.
    most_queries
        At least the queries of every sequence.
    longest
        At least every length: decides how the context is split.
    """
    return torch.ops.aten._flash_attention_forward(  # type: ignore[no-any-return]
        q,
        view.k,
        view.v,
        rows,
        starts,
        most_queries,
        longest,
        0.0,
        True,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
        seqused_k=view.lengths,
    )[0]


def _check_flash_limits(q: torch.Tensor, view: DenseView) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"the stock dense kernel on CUDA takes float16 and bfloat16, not {q.dtype}: "
            "choose another cache dtype or the paged backend"
        )
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        raise ValueError(
            f"the stock dense kernel on CUDA takes head dimensions up to 256 in steps of 8, "
            f"not {q.shape[-1]}"
        )
    if view.k.shape[0] >= 2**31:
        raise ValueError(
            f"the stock dense kernel on CUDA counts tokens in int32: a buffer of "
            f"{view.k.shape[0]} rows is too large, use less memory or more devices"
        )
    major, minor = torch.cuda.get_device_capability(q.device)
    if major < 8:
        raise ValueError(
            f"the stock dense kernel on CUDA needs compute capability 8.0, this is {major}.{minor}"
        )
