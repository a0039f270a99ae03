"""A peer to compare with: torch's own paged path, ``varlen_attn`` with a block table (CUDA).

Written by source, not yet run on a GPU.
"""

from __future__ import annotations

import torch

from ..contract import PagedView

PAGE_STEP = 256
"""FlashAttention-2 takes pages of multiples of this many tokens."""


def fits(view: PagedView) -> bool:
    """Whether this torch has the path, and it takes these pages: whole steps, token-major."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    parameters = varlen_attn.__annotations__
    return (
        {"block_table", "seqused_k", "num_splits"} <= set(parameters)
        and view.k.device.type == "cuda"
        and view.k.dtype in (torch.float16, torch.bfloat16)
        and view.k.shape[1] % PAGE_STEP == 0
        and view.k.stride(1) > view.k.stride(2)
    )


def paged_attention(
    q: torch.Tensor, view: PagedView, *, q_lens: list[int], scale: float, window: int | None
) -> torch.Tensor:
    """Attend by ``varlen_attn``; arguments as checked by ``attention.attend``, pages as ``fits``.

    Split over the context is off: with a block table it leaves rows unwritten (pytorch issue
    194167). Dropped leading pages are not supported: ``first`` is taken to be 0.
    """
    from torch.nn.attention.varlen import varlen_attn

    rows = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = view.block_table.shape[1] * view.k.shape[1]
    starts = torch.arange(len(q_lens) + 1, dtype=torch.int32, device=q.device) * longest
    out = varlen_attn(
        q,
        view.k,
        view.v,
        rows.to(q.device),
        starts,
        max(q_lens),
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
        seqused_k=view.lengths,
        block_table=view.block_table,
        num_splits=1,
    )
    assert isinstance(out, torch.Tensor)
    return out
