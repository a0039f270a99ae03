"""The mapped backend with tensors: pages follow the tokens, kernels see one plain buffer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import TracebackType

import numpy as np
import torch

from ..contract import DenseView, KVCache, Seq
from ..geometry import KVGeometry
from ..pages.pool import check_pool
from ..sequences import Ints, Rows, at_least_one, count, flag
from ..tensors import (
    BatchMemo,
    check_layer,
    check_lens,
    check_tensors,
    named_device,
    newest,
    on_device,
    seal,
    torch_dtype,
)
from .backed import BackedVmmAllocator
from .devices import make_driver
from .driver import Driver, DriverError, Guard, check_guard
from .guard import GUARD_TOKENS, lays_zeros
from .mapper import Mapper
from .physical import PhysicalPool
from .rows import plan_rows
from .space import RowSpace, most_rows

Spans = tuple[torch.Tensor, torch.Tensor, int]
"""Starts int64 ``[S]``, lengths int32 ``[S]``, and the longest of them."""


class VmmKVCache(BackedVmmAllocator, KVCache):
    """Sequences at consecutive addresses; physical pages are mapped under them as they grow.

    What is not told here is as for ``VmmAllocator``.

    Parameters
    ----------
    page_bytes
        Size of a page, a multiple of the driver's granularity.
    device
        Where the tensors live.
    pool
        Physical pages shared with other caches, instead of ``memory_bytes`` of its own: what
        one cache gives back another can take, also when it closes. Brings its own page size and
        driver.
    driver
        Where the memory comes from. None makes one for the device, which closes with the cache.
    guard
        What reads past the end of a sequence meet: ``"fault"``, a fault where nothing is mapped
        (unless the ``driver`` was made to read zeros); ``"zero"``, for kernels that load whole
        tiles: up to ``GUARD_TOKENS`` tokens past its end lie the sequence's own pages, then
        zeros, never another sequence. Where the driver faults, the cache lays the zeros itself,
        with one page of memory beside the pool's.
    scrub
        Overwrite tokens with zeros when their last holder gives them up, so that room which was
        not written yet reads as zeros, whoever had the pages. Together with ``guard="zero"`` a
        tile meets no remains either (which may be NaN). A pool then zeroes for all its caches.
    max_rows
        Most sequences at a time. None: twice as many as could have a page in each buffer,
        within 16 TiB of addresses. Having no row left is a refusal, never ``fragmented``.
    ahead_tokens, ahead_pages
        Let a thread map ``ahead_pages`` further pages per buffer for sequences that are within
        ``ahead_tokens`` tokens of a page boundary; 0 tokens: no thread. Refused where the cache
        lays zeros, which must not be replaced beside running kernels.

    Attributes
    ----------
    mapper : Mapper | None
        The thread that maps ahead.
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
        guard: Guard = "fault",
        scrub: bool = False,
        max_rows: int | None = None,
        ahead_tokens: int = 0,
        ahead_pages: int = 1,
    ) -> None:
        ahead_tokens = count("ahead_tokens", ahead_tokens)
        ahead_pages = count("ahead_pages", ahead_pages)
        if ahead_tokens and not ahead_pages:
            raise ValueError("mapping ahead needs at least one page: give ahead_pages >= 1")
        page_bytes = at_least_one("page_bytes", page_bytes)
        check_guard(guard)
        self.mapper: Mapper | None = None
        torch_dtype(geometry)  # refuses a latent
        self.scrub = flag("scrub", scrub)
        self._own_driver: Driver | None = None
        with ExitStack() as undo:
            if pool is None:
                if memory_bytes is None:
                    raise ValueError("give memory_bytes, or a pool to draw on")
                if driver is None:
                    driver = self._own_driver = make_driver(named_device(device), page_bytes, guard)
                    undo.callback(driver.close)
                pool = PhysicalPool(driver, memory_bytes, page_bytes)
            elif memory_bytes is not None or driver is not None:
                raise ValueError("a pool brings its own memory and driver: leave those out")
            check_pool(pool, PhysicalPool)
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
            undo.callback(pool.leave, self)
            spare_tokens = GUARD_TOKENS if guard == "zero" else 0
            self._make_rows(max_rows, spare_tokens, lays_zeros(guard, pool.driver, ahead_tokens))
            undo.pop_all()
        self.device = self._space.k[0].device
        self._group_of = {layer: g for g, group in enumerate(self.groups) for layer in group.layers}
        self._targets = BatchMemo[dict[tuple[int, int], torch.Tensor]]()
        self._views = BatchMemo[dict[tuple[int, int], Spans]]()
        if ahead_tokens:
            self.mapper = Mapper(self, ahead_tokens, ahead_pages)

    def _make_rows(self, max_rows: int | None, spare_tokens: int, guarded: bool) -> None:
        """Reserve the addresses of all rows, each with some that no sequence ever uses."""
        if self.limit is None and any(group.window for group in self.groups):
            self.limit = self.capacity  # windows let a sequence outgrow the memory, not its row
        tokens = self.capacity if self.limit is None else self.limit
        if not any(group.window for group in self.groups):
            tokens = min(tokens, self.capacity)
        plan = plan_rows(self.geometry, self.buffers, self.page_bytes, tokens + spare_tokens)
        if max_rows is None:
            paged = 2 * self.pool.num_pages // self.num_columns + 8
            max_rows = min(paged, most_rows(plan))
        self.max_rows = at_least_one("max_rows", max_rows)
        self._places = plan.places
        self._space = RowSpace(
            self.geometry,
            plan,
            self.max_rows,
            self.physical,
            scrub=self.scrub,
            guarded=guarded,
        )

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
        key = self._kind_of(check_layer(self.geometry, layer))
        targets = self._targets.get(self._version, seqs, lens, dict)
        if key not in targets:
            targets[key] = self._targets_of(seqs, lens, *key)
        index = targets[key]
        check_tensors(self.geometry, layer, k, v, len(index), self.device)
        self._space.k[layer][index] = k.detach()
        self._space.v[layer][index] = v.detach()

    def _targets_of(
        self, seqs: Sequence[Seq], lens: Sequence[int] | None, g: int, row_tokens: int
    ) -> torch.Tensor:
        rows = self._seqs.rows(seqs)
        lengths = self._length[rows]
        counts = check_lens(seqs, lengths, lens, self._seqs.sealed[rows], self._first_of(rows, g))
        owner, position = newest(lengths, counts)
        return on_device(rows[owner] * row_tokens + position, self.device)

    def view(self, layer: int, seqs: Sequence[Seq]) -> DenseView:
        """The whole buffer, and where each sequence starts in it; see ``KVCache.view``."""
        key = self._kind_of(layer := check_layer(self.geometry, layer))
        spans = self._views.get(self._version, seqs, None, dict)
        if key not in spans:
            spans[key] = self._spans_of(seqs, *key)
        window = self.geometry.layers[layer].window
        starts, lengths, longest = spans[key]
        k, v = self._space.k[layer], self._space.v[layer]
        return DenseView(k, v, starts, lengths, window, longest)

    def _spans_of(self, seqs: Sequence[Seq], g: int, row_tokens: int) -> Spans:
        """From the first token still mapped on."""
        rows = self._seqs.rows(seqs)
        first = self._first_of(rows, g)
        lengths = (self._length[rows] - first).astype(np.int32)
        starts = on_device(rows.astype(np.int64) * row_tokens + first, self.device)
        return starts, on_device(lengths, self.device), int(lengths.max(initial=0))

    def _kind_of(self, layer: int) -> tuple[int, int]:
        """Group and tokens per row: layers alike in both keep their tokens at equal places."""
        return self._group_of[layer], self._places[layer, 0].row_tokens

    def _first_of(self, rows: Rows, g: int) -> Ints:
        """The first token of each row that lies in mapped pages whole, int64 ``[S]``."""
        first: Ints = -(-self._gone[g][rows] * self.page_bytes // self.groups[g].token_bytes)
        return first

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """Unmap, release and free everything. After an error, closing again goes on from there.

        Raises
        ------
        DriverError
            Tensors over the memory are alive, from ``view`` or slices of those; nothing was
            closed.
        """
        with self.pool.lock:
            self._space.require_unseen()
        if self.mapper is not None:
            self.mapper.close()
        for seq in [*self._seqs, *self._seqs.away]:
            self.release(seq)
        self.reclaim()
        self._targets.clear()
        self._views.clear()
        self._space.close()
        self.pool.leave(self)  # the others go on, and ask their mates for pages
        if self._own_driver is not None:
            self._own_driver.close()
        seal(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The traceback of an error holds the views of its frames; the error is what counts then,
        # and the memory returns when the last of them goes.
        with suppress(*[DriverError] if error is not None else []):
            self.close()
