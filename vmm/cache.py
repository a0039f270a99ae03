"""The mapped backend with tensors: pages follow the tokens, kernels see one plain buffer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal

import numpy as np
import torch

from ..contract import DenseView, KVCache, OutOfMemory, Seq
from ..geometry import KVGeometry
from ..pages import PageIds
from ..sequences import Ints, Rows, count
from ..tensors import (
    BatchMemo,
    check_layer,
    check_lens,
    check_tensors,
    newest,
    on_device,
    seal,
    torch_dtype,
)
from .allocator import VmmAllocator
from .driver import Driver
from .physical import PhysicalPool
from .reservation import Reservation
from .rows import plan_rows

MOST_ADDRESS_BYTES = 1 << 44
"""16 of the 128 TiB of addresses that a process has: what the rows of one cache may take."""


class VmmKVCache(VmmAllocator, KVCache):
    """Sequences at consecutive addresses; physical pages are mapped under them as they grow.

    Parameters
    ----------
    geometry, memory_bytes, page_bytes, layout, adoption, limit
        As in ``VmmAllocator``; pages are multiples of the driver's granularity.
    device
        Where the tensors live.
    pool
        Physical pages shared with other caches, instead of ``memory_bytes`` of its own: what
        one cache gives back another can take. Brings its own page size and driver.
    driver
        Where the memory comes from. None makes one for the device, which closes with the cache.
    guard
        Of the driver made here: what a read of unmapped addresses does, see ``HostDriver``.
    scrub
        Overwrite pages with zeros when their last holder gives them up.
    max_rows
        Most sequences at a time. None: twice as many as could have a page in each buffer,
        within 16 TiB of addresses. Having no row left is a refusal, never ``fragmented``.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        memory_bytes: int | None = None,
        page_bytes: int = 2 << 20,
        *,
        layout: str = "token-major",
        adoption: str = "lowest",
        limit: int | None = None,
        device: torch.device | str = "cpu",
        pool: PhysicalPool | None = None,
        driver: Driver | None = None,
        guard: Literal["fault", "zero"] = "fault",
        scrub: bool = False,
        max_rows: int | None = None,
    ) -> None:
        dtype = torch_dtype(geometry)
        self.scrub = scrub
        with ExitStack() as undo:
            if pool is None:
                if driver is None:
                    driver = make_driver(torch.device(device), page_bytes, guard)
                    undo.callback(driver.close)
                pool = PhysicalPool(driver, count("memory_bytes", memory_bytes or 0), page_bytes)
            elif memory_bytes is not None or driver is not None:
                raise ValueError("a pool brings its own memory and driver: leave those out")
            self.physical = pool
            super().__init__(
                geometry,
                None,
                pool.page_bytes,
                layout=layout,
                adoption=adoption,
                limit=limit,
                pool=pool,
            )
            self._make_rows(max_rows, undo)
            self._exit = undo.pop_all()
        self._k = [self._tensor(dtype, i, 0) for i in range(len(geometry.layers))]
        self._v = [self._tensor(dtype, i, 1) for i in range(len(geometry.layers))]
        self._bytes = [self._flat(reservation, torch.uint8) for reservation in self._reservations]
        self.device = self._k[0].device
        self._group_of = {layer: g for g, group in enumerate(self.groups) for layer in group.layers}
        self._targets = BatchMemo[dict[int, torch.Tensor]]()
        self._views = BatchMemo[dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]]()

    def _make_rows(self, max_rows: int | None, undo: ExitStack) -> None:
        """Reserve the addresses of all rows: one range per buffer, since a view has one base."""
        tokens = self.capacity if self.limit is None else min(self.limit, self.capacity)
        plan = plan_rows(self.geometry, self.buffers, self.page_bytes, tokens)
        if max_rows is None:
            paged = 2 * self.pool.num_pages // self.num_columns + 8
            max_rows = max(1, min(paged, MOST_ADDRESS_BYTES // sum(plan.row_bytes)))
        self.max_rows = count("max_rows", max_rows)
        self._places = plan.places
        self._reservations = []
        for row_bytes in plan.row_bytes:
            reservation = Reservation(self.physical.driver, row_bytes * max_rows, self.page_bytes)
            self._reservations.append(reservation)
            undo.callback(reservation.free)
        self._runs = [
            [(self._reservations[c.reservation], c.row_bytes, c.offset) for c in columns]
            for columns in plan.columns
        ]

    def _flat(self, reservation: Reservation, dtype: torch.dtype) -> torch.Tensor:
        size = (reservation.num_bytes // dtype.itemsize,)
        return self.physical.driver.tensor(reservation.address, size, dtype)

    def _tensor(self, dtype: torch.dtype, layer: int, tensor: int) -> torch.Tensor:
        """K or V of a layer over all rows: ``[T, H_kv, D]``, mostly unmapped."""
        place, shape = self._places[layer, tensor], self.geometry.layers[layer]
        reservation = self._reservations[place.reservation]
        flat = self._flat(reservation, dtype)
        used = place.offset + (shape.kv_heads - 1) * place.head_stride
        used += shape.head_dim * dtype.itemsize
        num_tokens = (reservation.num_bytes - used) // place.token_stride + 1
        strides = (place.token_stride // dtype.itemsize, place.head_stride // dtype.itemsize, 1)
        size = (num_tokens, shape.kv_heads, shape.head_dim)
        return flat.as_strided(size, strides, place.offset // dtype.itemsize)

    # ------------------------------------------------------------------ reading and writing

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
        row_tokens = self._places[check_layer(self.geometry, layer), 0].row_tokens
        targets = self._targets.get(self._version, seqs, lens, dict)
        if row_tokens not in targets:
            targets[row_tokens] = self._targets_of(seqs, lens, row_tokens)
        index = targets[row_tokens]
        check_tensors(self.geometry, layer, k, v, len(index), self.device)
        self._k[layer][index] = k
        self._v[layer][index] = v

    def _targets_of(
        self, seqs: Sequence[Seq], lens: Sequence[int] | None, row_tokens: int
    ) -> torch.Tensor:
        rows = self._rows_of(seqs)
        lengths = self._length[rows]
        owner, position = newest(lengths, check_lens(seqs, lengths, lens))
        return on_device(rows[owner] * row_tokens + position, self.device)

    def view(self, layer: int, seqs: Sequence[Seq]) -> DenseView:
        """The whole buffer, and where each sequence starts in it; see ``KVCache.view``."""
        layer = check_layer(self.geometry, layer)
        key = (self._group_of[layer], self._places[layer, 0].row_tokens)
        spans = self._views.get(self._version, seqs, None, dict)
        if key not in spans:
            spans[key] = self._spans_of(seqs, *key)
        return DenseView(self._k[layer], self._v[layer], *spans[key])

    def _spans_of(
        self, seqs: Sequence[Seq], g: int, row_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Starts int64 ``[S]`` and lengths int32 ``[S]``, from the first token still mapped."""
        rows = self._rows_of(seqs)
        first = -(-self._gone[g][rows] * self.page_bytes // self.groups[g].token_bytes)
        starts = on_device(rows.astype(np.int64) * row_tokens + first, self.device)
        return starts, on_device((self._length[rows] - first).astype(np.int32), self.device)

    # ------------------------------------------------------------------ pages

    def _choose_row(self, tokens: int) -> int:
        row = super()._choose_row(tokens)
        if row >= self.max_rows:
            raise OutOfMemory(1, 0, 0, unit="rows")
        return row

    def _attach(self, rows: Rows, g: int, begins: Ints, ends: Ints) -> None:
        """Map the pages of the table, one access grant per contiguous run; all or nothing."""
        with ExitStack() as undo:
            for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
                if begin == end:
                    continue
                handles = self.physical.handles(
                    self._table.of_row(row, self._columns[g], begin, end)
                )
                for c, (reservation, row_bytes, offset) in enumerate(self._runs[g]):
                    at = row * row_bytes + offset + begin * self.page_bytes
                    size = end - begin
                    reservation.map(at, handles[c * size : (c + 1) * size])
                    undo.callback(reservation.unmap, at, size)
            undo.pop_all()

    def _detach(self, rows: Rows, g: int, begins: Ints, ends: Ints) -> None:
        """Unmap pages, once queued work that may read them has completed."""
        self.physical.driver.wait(self.physical.driver.fence())
        for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
            if begin == end:
                continue
            for reservation, row_bytes, offset in self._runs[g]:
                at = row * row_bytes + offset + begin * self.page_bytes
                reservation.unmap(at, end - begin)

    # ------------------------------------------------------------------ contents of pages

    def _spots(self, row: int, g: int, begin: int, end: int) -> list[torch.Tensor]:
        """The bytes of pages ``begin … end − 1`` of a row, one tensor per column."""
        spots = []
        for reservation, row_bytes, offset in self._runs[g]:
            at = row * row_bytes + offset
            flat = self._bytes[self._reservations.index(reservation)]
            spots.append(flat[at + begin * self.page_bytes : at + end * self.page_bytes])
        return spots

    def _read(self, row: int, g: int, begin: int, end: int) -> list[torch.Tensor]:
        return [spot.cpu().clone() for spot in self._spots(row, g, begin, end)]

    def _write_back(
        self, row: int, g: int, begin: int, end: int, contents: list[torch.Tensor]
    ) -> None:
        for spot, saved in zip(self._spots(row, g, begin, end), contents, strict=True):
            spot.copy_(saved)

    def _scrub(self, row: int, g: int, begin: int, end: int) -> None:
        if not self.scrub:
            return
        for n in range(begin, end):
            pages = self._table.of_row(row, self._columns[g], n, n + 1)
            if (self.pool.refs(pages) == 1).all() and not self.prefix_index.holds(pages):
                for spot in self._spots(row, g, n, n + 1):
                    spot.zero_()

    def _scrub_evicted(self, pages: PageIds) -> None:
        if self.scrub:  # mapped nowhere: the system hands out zeroed memory for the next handle
            self.physical.release_memory(pages)

    # ------------------------------------------------------------------ giving back

    def reclaim(self) -> int:
        """Unmap all warm pages, empty the prefix index, return free memory to the system."""
        num = super().reclaim()
        self.physical.trim()
        return num

    def close(self) -> None:
        """Unmap, release and free everything. Tensors handed out before must not be touched."""
        for seq in [*self._seqs, *self._away]:
            self.release(seq)
        self.reclaim()
        self._k, self._v, self._bytes = [], [], []
        for memo in (self._targets, self._views):
            memo.clear()
        self._exit.close()
        seal(self)


def make_driver(device: torch.device, page_bytes: int, guard: Literal["fault", "zero"]) -> Driver:
    """The driver for a device, for pages of ``page_bytes``."""
    if device.type == "cpu":
        from .host import HostDriver

        return HostDriver(page_bytes, guard)
    raise ValueError(f"no driver for {device}: use cpu")
