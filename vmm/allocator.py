"""The mapped backend's books: physical pages under one contiguous address range per sequence.

A sequence owns a *row* of every buffer: an address range long enough for the longest sequence,
with pages under its beginning. Token ``t`` of row ``r`` lies at byte ``r · row_bytes +
t · token_bytes`` of the buffer, whatever pages are mapped there. (Prabhu et al., vAttention,
ASPLOS 2025.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..geometry import KVGeometry
from ..pages import PagePool
from ..paging import PageAllocator, PageGroup
from ..sequences import count

LAYOUTS = ("token-major", "head-major", "interleaved")
ADOPTION = ("lowest", "fit-prompt")


@dataclass(frozen=True)
class Buffer:
    """One address run per row: K or V of a layer, one head of it, or several layers whole.

    Attributes
    ----------
    layers : tuple of int
        The layers stored, more than one only if interleaved.
    tensor, head : int
        0 for K, 1 for V, and the KV head; −1 where the buffer holds them all.
    token_bytes : int
        Distance between the tokens of a row.
    """

    layers: tuple[int, ...]
    tensor: int
    head: int
    token_bytes: int


def buffers_of(geometry: KVGeometry, layout: str) -> list[list[Buffer]]:
    """The buffers of a layout, grouped by pace and window: a group crosses pages together."""
    groups: dict[tuple[int, int | None], list[Buffer]] = {}

    def add(layers: tuple[int, ...], tensor: int, head: int, token_bytes: int) -> None:
        window = geometry.layers[layers[0]].window
        buffer = Buffer(layers, tensor, head, token_bytes)
        groups.setdefault((token_bytes, window), []).append(buffer)

    if layout == "interleaved":
        windows = [shape.window for shape in geometry.layers]
        for window in dict.fromkeys(windows):
            layers = tuple(i for i, other in enumerate(windows) if other == window)
            add(layers, -1, -1, sum(map(geometry.layer_bytes, layers)))
        return list(groups.values())
    for i, shape in enumerate(geometry.layers):
        for tensor in range(shape.tensors):
            if layout == "token-major":
                add((i,), tensor, -1, geometry.tensor_bytes(i))
            else:
                for head in range(shape.kv_heads):
                    add((i,), tensor, head, geometry.tensor_bytes(i) // shape.kv_heads)
    return list(groups.values())


class VmmAllocator(PageAllocator):
    """Pages mapped where the tokens are expected to be; no table for the kernel to read.

    Parameters
    ----------
    geometry
        Bytes per token; ``SLOTS`` counts tokens alone.
    memory_bytes
        Physical memory, rounded down to whole pages.
    page_bytes
        Size of a page: a multiple of the driver's granularity (any size for the books alone).
    layout
        ``"token-major"``: one buffer per layer and tensor, ``[row, token, head, dim]``;
        ``"head-major"``: one per layer, tensor and head, ``[row, head, token, dim]``;
        ``"interleaved"``: all layers of equal window in one, ``[row, token, layer, …]``, so that
        a sequence wastes one page tail instead of one per buffer.
    adoption
        Which idle row a new sequence takes over, with the pages still mapped there:
        ``"lowest"`` or ``"fit-prompt"`` (fewest mapped pages that cover the prompt, else most).
    limit
        Most tokens per sequence; None takes the model's context limit.
    pool
        The pages themselves, where somebody else made them (a cache does).
    """

    def __init__(
        self,
        geometry: KVGeometry,
        memory_bytes: int | None,
        page_bytes: int = 2 << 20,
        *,
        layout: str = "token-major",
        adoption: str = "lowest",
        limit: int | None = None,
        pool: PagePool | None = None,
    ) -> None:
        page_bytes = count("page_bytes", page_bytes)
        if page_bytes < 1:
            raise ValueError("a page holds at least one byte; give page_bytes >= 1")
        if adoption not in ADOPTION:
            raise ValueError(f"unknown adoption {adoption!r}; choose one of {', '.join(ADOPTION)}")
        if layout not in LAYOUTS:
            raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
        self.layout = layout
        self.adoption = adoption
        self.buffers = buffers_of(geometry, layout)
        groups = [
            PageGroup(
                tuple(layer for buffer in buffers for layer in buffer.layers),
                len(buffers),
                buffers[0].token_bytes,
                geometry.layers[buffers[0].layers[0]].window,
            )
            for buffers in self.buffers
        ]
        super().__init__(geometry, memory_bytes, page_bytes, groups, limit=limit, pool=pool)

    def _choose_row(self, tokens: int) -> int:
        idle = self._seqs.free_rows
        if not idle:
            return self._seqs.next_row()
        if self.adoption == "lowest":
            return min(idle)
        return min(idle, key=self._misfit(tokens))

    def _misfit(self, tokens: int) -> Callable[[int], tuple[bool, int]]:
        """Key that prefers the row with the fewest surplus pages, then the least lack."""
        need = int(self._pages_for(np.array([tokens]), 0)[0])

        def misfit(row: int) -> tuple[bool, int]:
            surplus = int(self._ready[0][row]) - need
            return surplus < 0, abs(surplus)

        return misfit

    def _empty_row(self, row: int) -> None:
        """Leave the pages mapped: the next sequence of this row needs no driver call."""
        if any(gone[row] for gone in self._gone):
            self._clear_row(row)
            return
        for g in range(len(self.groups)):
            self._retire_tail(row, g, 0)

    def _retire_tail(self, row: int, g: int, begin: int) -> None:
        """Keep pages that nobody else holds or may ask for in place, as warm ones."""
        held = int(self._held[g][row])
        pages = self._table.of_row(row, self._columns[g], begin, held)
        if (self.pool.refs(pages) > 1).any() or self.prefix_index.holds(pages):
            self._drop_tail(row, g, begin)
            return
        self._scrub(row, g, begin, held)
        self.pool.drop(pages)
        self._num_used -= len(pages)
        self._add_warm(len(pages))
        self._held[g][row] = begin

    def reclaim(self) -> int:
        """Unmap every warm page and empty the prefix index; returns how many pages came free."""
        before = self.pool.num_free
        self._reclaim(self.pool.num_pages)
        return self.pool.num_free - before

    def _reclaim(self, num_pages: int) -> None:
        """Take back warm pages, least valuable first, then units of the prefix index.

        Tails of the highest idle rows go first, since the lowest idle row is adopted first.
        """
        goal = self.pool.num_free + num_pages
        warm = np.zeros(len(self._length), np.bool_)
        for held, ready in zip(self._held, self._ready, strict=True):
            warm |= ready > held
        rows = np.flatnonzero(warm)[::-1]
        idle = self._covered[rows] == 0
        for row in [*rows[idle].tolist(), *rows[~idle].tolist()]:
            if self.pool.num_free >= goal:
                break
            self._unmap_warm(row, goal)
        if self.pool.num_free < goal:
            super()._reclaim(goal - self.pool.num_free)

    def _unmap_warm(self, row: int, goal: int) -> None:
        """Unmap the warm tail of a row, or as much of it as the goal asks for."""
        for g, columns in enumerate(self._columns):
            held, ready = int(self._held[g][row]), int(self._ready[g][row])
            lack = -(-(goal - self.pool.num_free) // len(columns))
            begin = max(held, ready - max(lack, 0))
            if begin == ready:
                continue
            pages = self._table.of_row(row, columns, begin, ready)
            self._detach(np.array([row]), g, np.array([begin]), np.array([ready]))
            self._ready[g][row] = begin
            self._add_warm(-len(pages))
            self.pool.put(pages)

    def _table_bytes(self) -> int:
        return 8 * len(self._seqs)  # one start per sequence
