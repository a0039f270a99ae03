"""The block table of a batch, kept between steps: only rows that changed are copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..contract import Seq
from ..sequences import Rows, require_batch
from ..tensors import on_device

if TYPE_CHECKING:
    from .cache import PagedKVCache


class BlockTable:
    """What a kernel reads for one column of the cache's page table."""

    def __init__(self, cache: PagedKVCache, group: int, column: int) -> None:
        self._cache = cache
        self._group = group
        self._column = column
        self._seqs: list[Seq] = []
        self._version = self._clock = -1
        self._rows: Rows = np.zeros(0, np.intp)
        self._table = torch.zeros(0, 0, dtype=torch.int32)
        self._first = self._lengths = torch.zeros(0, dtype=torch.int32)

    def read(self, seqs: Sequence[Seq]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Block table int32 ``[S, max_pages]``, first int32 ``[S]``, lengths int32 ``[S]``."""
        cache = self._cache
        require_batch(seqs)
        if self._version != cache._version or self._seqs != list(seqs):
            rows = cache._seqs.rows(seqs)
            self._update_table(rows)
            first = cache._gone[self._group][rows] * cache.page_size
            self._first = on_device(first.astype(np.int32), cache.device)
            self._lengths = on_device(cache._length[rows].astype(np.int32), cache.device)
            self._seqs, self._version = list(seqs), cache._version
        return self._table, self._first, self._lengths

    def _update_table(self, rows: Rows) -> None:
        cache, source = self._cache, self._cache._table
        width = max(int(cache._held[self._group][rows].max(initial=0)), 1)
        if width > self._table.shape[1] or not np.array_equal(rows, self._rows):
            self._table = on_device(source.pages[rows, self._column, :width], cache.device)
        elif self._clock != source.clock:
            changed = (source.stamp[rows] > self._clock).nonzero()[0]
            entries = source.pages[rows[changed], self._column, : self._table.shape[1]]
            self._table[on_device(changed, cache.device)] = on_device(entries, cache.device)
        self._rows, self._clock = rows, source.clock
