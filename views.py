"""What a cache hands to a kernel: where the tokens of a batch are, in one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DenseView:
    """One layer of a batch, each sequence at consecutive addresses of one big buffer.

    Attributes
    ----------
    k, v : torch.Tensor
        ``[T, H_kv, D]``, any strides with a contiguous last dimension. Token ``j`` of
        sequence ``i`` is row ``starts[i] + j``. Rows outside ``[starts, starts + lengths)``
        may be unmapped: touching them can kill the process.
    starts : torch.Tensor
        int64 ``[S]``.
    lengths : torch.Tensor
        int32 ``[S]``: readable tokens. After a sliding window dropped leading tokens,
        ``starts`` is advanced and ``lengths`` shortened.
    """

    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedView:
    """One layer of a batch, each sequence scattered over pages.

    Attributes
    ----------
    k, v : torch.Tensor
        ``[num_pages, page_size, H_kv, D]``, any strides with a contiguous last dimension.
        Token ``t`` of sequence ``i`` is ``k[block_table[i, t // B], t % B]``.
    block_table : torch.Tensor
        int32 ``[S, max_pages]``. Entries that hold no token of ``[first, lengths)`` are
        undefined and never to be read.
    first : torch.Tensor
        int32 ``[S]``: the first token still stored (a sliding window may have dropped
        leading pages).
    lengths : torch.Tensor
        int32 ``[S]``: tokens of the sequence, dropped ones included; tokens
        ``first <= t < lengths`` are readable.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    first: torch.Tensor
    lengths: torch.Tensor
