"""The peer to beat on the paged side: copy a sequence's pages together, then run a dense kernel."""

from __future__ import annotations

import torch

from ..contract import DenseView, PagedView
from .dense import dense_attention


def paged_attention(
    q: torch.Tensor, view: PagedView, *, q_lens: list[int], scale: float, window: int | None
) -> torch.Tensor:
    """Attend by gather and stock dense kernel; arguments as checked by ``attention.attend``.

    Every call copies all stored tokens: what an adapter costs that must hand out contiguous
    K and V. It waits for the device, since the sizes of the copies are needed on the host.
    """
    page_size = view.k.shape[1]
    lengths, first = view.lengths.tolist(), view.first.tolist()
    kept = [length - begin for length, begin in zip(lengths, first, strict=True)]
    k = torch.empty((sum(kept), *view.k.shape[2:]), dtype=q.dtype, device=q.device)
    v = torch.empty_like(k)
    starts = []
    row = 0
    for seq, (begin, length) in enumerate(zip(first, lengths, strict=True)):
        starts.append(row)
        if begin == length:
            continue
        low, high = begin // page_size, -(-length // page_size)
        pages = view.block_table[seq, low:high]
        skipped = begin - low * page_size
        rows = slice(row, row + length - begin)
        for packed, stored in ((k, view.k), (v, view.v)):
            gathered = stored.index_select(0, pages).flatten(0, 1)
            packed[rows] = gathered[skipped : skipped + length - begin]
        row = rows.stop
    dense = DenseView(
        k,
        v,
        torch.tensor(starts, dtype=torch.int64),
        torch.tensor(kept, dtype=torch.int32),
    )
    return dense_attention(q, dense, q_lens=q_lens, scale=scale, window=window)
