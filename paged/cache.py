"""The block-table backend with tensors: a pool of pages per layer, and the tables to read it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..contract import KVCache, PagedView, Seq
from ..geometry import KVGeometry
from ..tensors import (
    BatchMemo,
    check_layer,
    check_lens,
    check_tensors,
    default_layout,
    newest,
    on_device,
    seal,
    torch_dtype,
)
from .allocator import PagedAllocator

Slots = tuple[torch.Tensor, torch.Tensor]


class PagedKVCache(PagedAllocator, KVCache):
    """Pages of ``page_size`` tokens with K and V behind them.

    Parameters
    ----------
    geometry, memory_bytes, page_size, limit
        As in ``PagedAllocator``.
    device
        Where the tensors live.
    layout
        Memory order within a page: ``"token-major"`` ``[page, token, head, dim]`` or
        ``"head-major"`` ``[page, head, token, dim]``. Views hide it behind their strides.
        None takes the faster one of the device.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        memory_bytes: int,
        page_size: int = 16,
        *,
        limit: int | None = None,
        device: torch.device | str = "cpu",
        layout: str | None = None,
    ) -> None:
        dtype = torch_dtype(geometry)
        super().__init__(geometry, memory_bytes, page_size, limit=limit)
        self.layout = default_layout(device, layout)
        self._k = [self._pages_of(i, dtype, device) for i in range(len(geometry.layers))]
        self._v = [self._pages_of(i, dtype, device) for i in range(len(geometry.layers))]
        self.device = self._k[0].device
        self._slots = BatchMemo[Slots]()
        self._readers = [_BlockTable(self, g) for g in range(len(self.groups))]
        self._reader_of = {
            i: r for r, g in zip(self._readers, self.groups, strict=True) for i in g.layers
        }

    def _pages_of(self, layer: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        shape = self.geometry.layers[layer]
        num, size = self.pool.num_pages, self.page_size
        if self.layout == "token-major":
            return torch.empty(
                num, size, shape.kv_heads, shape.head_dim, dtype=dtype, device=device
            )
        pages = torch.empty(num, shape.kv_heads, size, shape.head_dim, dtype=dtype, device=device)
        return pages.transpose(1, 2)

    def write(
        self,
        layer: int,
        seqs: Sequence[Seq],
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        lens: Sequence[int] | None = None,
    ) -> None:
        """Store the newest tokens of each sequence; see ``KVCache.write``."""
        pages, offsets = self._slots.get(
            self._version, seqs, lens, lambda: self._slots_of(seqs, lens)
        )
        check_tensors(self.geometry, layer, k, v, len(pages), self.device)
        self._k[layer][pages, offsets] = k
        self._v[layer][pages, offsets] = v

    def _slots_of(self, seqs: Sequence[Seq], lens: Sequence[int] | None) -> Slots:
        rows = self._seqs.rows(seqs)
        lengths = self._length[rows]
        owner, position = newest(lengths, check_lens(seqs, lengths, lens))
        pages = self._table.pages[rows[owner], 0, position // self.page_size]
        return (
            on_device(pages.astype(np.int64), self.device),
            on_device(position % self.page_size, self.device),
        )

    def view(self, layer: int, seqs: Sequence[Seq]) -> PagedView:
        """Pages, block table and lengths of a batch; see ``KVCache.view``."""
        reader = self._reader_of[check_layer(self.geometry, layer)]
        table, first, lengths = reader.read(seqs)
        return PagedView(self._k[layer], self._v[layer], table, first, lengths)

    def close(self) -> None:
        """Let go of the pools."""
        self._k, self._v = [], []
        self._slots.clear()
        self._readers, self._reader_of = [], {}
        seal(self)


class _BlockTable:
    """The block table of a batch, kept between steps: only rows that changed are copied."""

    def __init__(self, cache: PagedKVCache, group: int) -> None:
        self._cache = cache
        self._group = group
        self._seqs: list[Seq] = []
        self._version = self._clock = -1
        self._rows = np.zeros(0, np.intp)
        self._table = torch.zeros(0, 0, dtype=torch.int32)
        self._first = self._lengths = self._table[:, 0:0]

    def read(self, seqs: Sequence[Seq]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Block table int32 ``[S, max_pages]``, first int32 ``[S]``, lengths int32 ``[S]``."""
        cache, group = self._cache, self._group
        if self._version == cache._version and self._seqs == list(seqs):
            return self._table, self._first, self._lengths
        rows = cache._seqs.rows(seqs)
        same = np.array_equal(rows, self._rows)
        width = int(cache._held[group][rows].max(initial=0))
        source = cache._table
        if not same or width > self._table.shape[1]:
            pages = source.pages[rows, group, : max(width, 1)]
            self._table = on_device(pages, cache.device)
        elif self._clock != source.clock:
            changed = (source.stamp[rows] > self._clock).nonzero()[0]
            pages = source.pages[rows[changed], group, : self._table.shape[1]]
            self._table[on_device(changed, cache.device)] = on_device(pages, cache.device)
        self._seqs, self._rows = list(seqs), rows
        self._version, self._clock = cache._version, source.clock
        first = cache._gone[group][rows] * cache.page_size
        self._first = on_device(first.astype(np.int32), cache.device)
        self._lengths = on_device(cache._length[rows].astype(np.int32), cache.device)
        return self._table, self._first, self._lengths
