"""The block-table backend with tensors: pools of pages, and the tables to read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..contract import KVCache, PagedView, Seq
from ..geometry import KVGeometry
from ..pages.pool import PageIds
from ..sequences import flag
from ..tensors import (
    BatchMemo,
    check_device,
    check_layer,
    check_lens,
    check_tensors,
    default_layout,
    host_memory,
    made,
    newest,
    on_device,
    seal,
    torch_dtype,
)
from .allocator import PagedAllocator
from .block_table import BlockTable

Slots = tuple[torch.Tensor, torch.Tensor]


class PagedKVCache(PagedAllocator, KVCache):
    """Pages of ``page_size`` tokens with K and V behind them.

    What is not told here is as for ``PagedAllocator``.

    Parameters
    ----------
    device
        Where the tensors live.
    layout
        Memory order within a page: ``"token-major"`` ``[page, token, head, dim]`` or
        ``"head-major"`` ``[page, head, token, dim]``. Views hide it behind their strides.
        None takes the faster one of the device.
    scrub
        Overwrite tokens with zeros when their last holder gives them up, so that room which was
        not written yet reads as zeros.
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
        scrub: bool = False,
    ) -> None:
        dtype = torch_dtype(geometry)
        super().__init__(geometry, memory_bytes, page_size, limit=limit)
        device = check_device(device)
        self.layout = default_layout(device, layout)
        self.scrub = flag("scrub", scrub)
        places = [self._place_of(layer) for layer in range(len(geometry.layers))]
        self._columns_of = [column for _, column, _ in places]
        self._places = [place for _, _, place in places]
        # Layers at the same place of their pages share one pool: equal shapes, different pages.
        self._k = [self._pool_of(place, dtype, device) for place in range(self.layers_per_page)]
        self._v = [self._pool_of(place, dtype, device) for place in range(self.layers_per_page)]
        self.device = self._k[0].device
        self._tables = {column: BlockTable(self, g, column) for g, column, _ in places}
        self._slots = BatchMemo[dict[int, Slots]]()

    def _pool_of(self, layer: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """All pages of one place, ``[num_pages, page_size, H_kv, D]``."""
        shape = self.geometry.layers[layer]
        num, size = self.pool.num_pages, self.page_size
        inner = [size, shape.kv_heads] if self.layout == "token-major" else [shape.kv_heads, size]
        make = torch.zeros if self.scrub else torch.empty
        pages = made(make, num, *inner, shape.head_dim, dtype=dtype, device=device)
        return pages if self.layout == "token-major" else pages.transpose(1, 2)

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
        column = self._columns_of[check_layer(self.geometry, layer)]
        slots = self._slots.get(self._version, seqs, lens, dict)
        if column not in slots:
            slots[column] = self._slots_of(seqs, lens, layer)
        pages, offsets = slots[column]
        check_tensors(self.geometry, layer, k, v, len(pages), self.device)
        place = self._places[layer]
        self._k[place][pages, offsets] = k.detach()
        self._v[place][pages, offsets] = v.detach()

    def _slots_of(self, seqs: Sequence[Seq], lens: Sequence[int] | None, layer: int) -> Slots:
        g, column, _ = self._place_of(layer)
        rows = self._seqs.rows(seqs)
        lengths, first = self._length[rows], self._gone[g][rows] * self.page_size
        counts = check_lens(seqs, lengths, lens, self._seqs.sealed[rows], first)
        owner, position = newest(lengths, counts)
        pages = self._table.pages[rows[owner], column, position // self.page_size]
        return (
            on_device(pages.astype(np.int64), self.device),
            on_device(position % self.page_size, self.device),
        )

    def view(self, layer: int, seqs: Sequence[Seq]) -> PagedView:
        """Pages, block table and lengths of a batch; see ``KVCache.view``."""
        table = self._tables[self._columns_of[check_layer(self.geometry, layer)]]
        place, window = self._places[layer], self.geometry.layers[layer].window
        return PagedView(self._k[place], self._v[place], *table.read(seqs), window)

    def close(self) -> None:
        """Let go of the pools."""
        self._k, self._v = [], []
        self._slots.clear()
        self._tables = {}
        self._seqs.away.clear()
        seal(self)

    # ------------------------------------------------------------------ contents of pages

    def _read(self, row: int, g: int, begin: int, end: int) -> list[torch.Tensor]:
        pages = self._index(self._table.of_row(row, self._columns[g], begin, end))
        with host_memory():
            return [pool[pages].cpu() for pool in (*self._k, *self._v)]

    def _write_back(
        self, row: int, g: int, begin: int, end: int, contents: list[torch.Tensor]
    ) -> None:
        pages = self._index(self._table.of_row(row, self._columns[g], begin, end))
        for pool, saved in zip((*self._k, *self._v), contents, strict=True):
            pool[pages] = saved.to(self.device)

    def _scrub(self, pages: PageIds) -> None:
        if self.scrub and len(pages):
            index = self._index(pages)
            for pool in (*self._k, *self._v):
                pool[index] = 0

    def _scrub_rest(self, row: int, g: int, tokens: int, end: int) -> None:
        if self.scrub and (first := tokens % self.page_size):
            last = self._index(self._table.of_row(row, self._columns[g], end - 1, end))
            for pool in (*self._k, *self._v):
                pool[last, first:] = 0

    def _index(self, pages: PageIds) -> torch.Tensor:
        return on_device(pages.astype(np.int64), self.device)
