"""Attention in float64, as plain as the definition, for tests and for ``--verify``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..contract import DenseView, PagedView


def reference_attention(
    q: torch.Tensor,
    view: DenseView | PagedView,
    *,
    q_lens: Sequence[int] | torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention, bottom-right aligned, one sequence at a time.

    Parameters are those of ``attention.attend``; nothing outside the readable tokens is read.

    Returns
    -------
    torch.Tensor
        float64 ``[T_q, H_q, D]`` on the device of ``q``; rows of empty sequences are 0.
    """
    num_seqs = len(view.lengths)
    counts = [1] * num_seqs if q_lens is None else [int(n) for n in q_lens]
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    window = view.window if window is None else window
    outputs = [
        _attend_one(queries.double(), *stored_tokens(view, seq), factor, window)
        for seq, queries in enumerate(torch.split(q, counts))
    ]
    return torch.cat(outputs) if outputs else q.double()


def stored_tokens(view: DenseView | PagedView, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of K and V, ``[tokens, H_kv, D]`` each, of the readable tokens of one sequence."""
    length = int(view.lengths[seq])
    if isinstance(view, DenseView):
        start = int(view.starts[seq])
        return view.k[start : start + length].clone(), view.v[start : start + length].clone()
    page_size = view.k.shape[1]
    at = torch.arange(int(view.first[seq]), length, device=view.k.device)
    page = view.block_table[seq, at // page_size].long()
    return view.k[page, at % page_size], view.v[page, at % page_size]


def _attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """``q`` ``[n, H_q, D]`` over ``k``, ``v`` ``[L, H_kv, D]``, query ``i`` at ``L − n + i``."""
    num_queries, length = len(q), len(k)
    if length == 0:
        return torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.double().repeat_interleave(group, dim=1) for tensor in (k, v))
    query_at = torch.arange(length - num_queries, length, device=q.device)[:, None]
    token_at = torch.arange(length, device=q.device)[None, :]
    hidden = token_at > query_at
    if window is not None:
        hidden |= token_at <= query_at - min(window, length)
    scores = torch.einsum("nhd,lhd->hnl", q, k) * scale
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
    return torch.einsum("hnl,lhd->nhd", weights, v)
