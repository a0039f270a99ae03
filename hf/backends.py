"""The three backends as rows of a batch: where the rows lie, and how beams change places."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..contiguous import ContiguousKVCache
from ..contract import DenseView, PagedView
from ..geometry import KVGeometry
from ..pages.exchange import exchange
from ..sequences import at_least_one
from ..tensors import default_layout
from ..vmm.buffers import LAYOUTS, buffers_of
from .refusals import or_none
from .rewindable import Rewindable, RewindablePaged, RewindableVmm
from .rows import Rows

HOST_PAGE_BYTES = 64 << 10
DEVICE_PAGE_BYTES = 2 << 20
MOST_MAPPINGS = 1 << 15
"""Half of what a Linux process may have: each page can be a mapping of its own."""

Pair = tuple[torch.Tensor, torch.Tensor]


class PageRows(Rows):
    """Rows over pages: beams share them, and a window's pages can be kept for a crop."""

    @property
    def _pages(self) -> Rewindable:
        assert isinstance(self._kv, Rewindable)
        return self._kv

    def record(self, length: int | None) -> None:
        """Keep what windows let go of from ``length`` tokens on, for a crop; None: keep none."""
        super().record(length)
        if self._kv is not None:
            self._pages.floor = length

    def reset(self) -> None:
        """Forget the tokens and keep the memory for the next batch."""
        if self.recorded is not None:
            self.record(0)
        super().reset()

    def check_crop(self, length: int) -> None:
        """Refuse a crop behind a window, or through shared pages without memory for copies."""
        super().check_crop(length)
        if length < self._booked:
            self._pages.check_cut(self.seqs, length)

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens of every row."""
        if self.recorded is not None:
            self.record(length)
        super().crop(length)

    def _rearrange(self, sources: list[int], length: int) -> None:
        exchange(self._pages, list(range(len(sources))), sources)


class DenseRows(Rows):
    """Rows at equal distance in one buffer, so that a batch is one strided tensor."""

    def tensors(self, layer: int) -> Pair:
        """K and V ``[rows, H_kv, most tokens, D]`` over the rows' addresses, used or not."""
        view = self.kv.view(layer, self.seqs)
        assert isinstance(view, DenseView)
        starts = [  # of the rows: a window starts the view later
            start - (self.kv.length(seq) - shown)
            for seq, start, shown in zip(
                self.seqs, view.starts.tolist(), view.lengths.tolist(), strict=True
            )
        ]
        step = starts[1] - starts[0] if len(starts) > 1 else 0
        assert starts == [starts[0] + i * step for i in range(len(starts))], "rows apart"
        num_tokens = self.max_length
        if all(window is None for window in self.windows):  # else rows may outgrow the memory
            num_tokens = min(num_tokens, self.kv.capacity)
        k, v = (
            buffer.as_strided(
                (len(starts), buffer.shape[1], num_tokens, buffer.shape[2]),
                (step * buffer.stride(0), buffer.stride(1), buffer.stride(0), 1),
                buffer.storage_offset() + starts[0] * buffer.stride(0),
            )
            for buffer in (view.k, view.v)
        )
        return k, v


class VmmRows(PageRows, DenseRows):
    """Rows of a mapped cache: pages come under them as they grow."""

    def __init__(
        self,
        windows: Sequence[int | None],
        max_length: int,
        memory_bytes: int | None,
        page_bytes: int | None,
        layout: str | None,
    ) -> None:
        super().__init__(windows, max_length, memory_bytes)
        self.page_bytes = or_none("page_bytes", page_bytes)
        if layout is not None and layout not in LAYOUTS:
            raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
        self.layout = layout

    def _build(self, num_rows: int, k: torch.Tensor) -> RewindableVmm:
        geometry = self.geometry(k)
        layout = self.layout or default_layout(k.device, None)
        page_bytes = self.page_bytes or _default_page(geometry, layout, num_rows, k.device)
        memory_bytes = self.memory_bytes
        if memory_bytes is None:
            memory_bytes = num_rows * page_bytes * _pages_of_row(geometry, layout, page_bytes)
        kv = RewindableVmm(geometry, memory_bytes, page_bytes, layout=layout, device=k.device)
        kv.floor = self.recorded
        return kv

    def _serves(self, num_rows: int, k: torch.Tensor) -> bool:
        is_open = not (isinstance(self._kv, RewindableVmm) and self._kv.is_closing)
        return is_open and super()._serves(num_rows, k)

    def _num_room(self) -> int:
        assert isinstance(self._kv, RewindableVmm)
        return self._kv.num_room(range(self.num_rows))


def _pages_of_row(geometry: KVGeometry, layout: str, page_bytes: int) -> int:
    """Pages over all buffers of a sequence of ``max_context`` tokens."""
    buffers = [buffer for group in buffers_of(geometry, layout) for buffer in group]
    tokens = geometry.max_context or 0
    return sum(-(-tokens * buffer.token_bytes // page_bytes) for buffer in buffers)


def _default_page(geometry: KVGeometry, layout: str, num_rows: int, device: torch.device) -> int:
    """On the CPU the smallest page that cannot use up the process's mappings."""
    if device.type != "cpu":
        return DEVICE_PAGE_BYTES
    page_bytes = HOST_PAGE_BYTES
    while (
        page_bytes < DEVICE_PAGE_BYTES
        and num_rows * _pages_of_row(geometry, layout, page_bytes) > MOST_MAPPINGS
    ):
        page_bytes *= 2
    return page_bytes


class ContiguousRows(DenseRows):
    """Rows of an arena, each reserved for ``max_length`` tokens from the start."""

    def _build(self, num_rows: int, k: torch.Tensor) -> ContiguousKVCache:
        geometry = self.geometry(k)
        memory_bytes = self.memory_bytes
        if memory_bytes is None:
            memory_bytes = num_rows * self.max_length * geometry.bytes_per_token
        return ContiguousKVCache(geometry, memory_bytes, policy="limit", device=k.device)

    def _num_room(self) -> int:
        return self.max_length

    def _rearrange(self, sources: list[int], length: int) -> None:
        """Nothing can be shared here: the rows that change are copied."""
        to = [row for row, source in enumerate(sources) if row != source]
        origin = [sources[row] for row in to]
        for layer in range(len(self.windows) if to else 0):
            for rows in self.tensors(layer):
                tokens = rows.narrow(2, 0, length)
                tokens[to] = tokens[origin]


class PagedRows(PageRows):
    """Rows scattered over pages: gathered for a dense kernel, or read through block tables."""

    def __init__(
        self,
        windows: Sequence[int | None],
        max_length: int,
        memory_bytes: int | None,
        page_size: int,
    ) -> None:
        super().__init__(windows, max_length, memory_bytes)
        self.page_size = at_least_one("page_size", page_size)

    def _build(self, num_rows: int, k: torch.Tensor) -> RewindablePaged:
        geometry, size = self.geometry(k), self.page_size
        memory_bytes = self.memory_bytes
        if memory_bytes is None:
            memory_bytes = num_rows * -(-self.max_length // size) * size * geometry.bytes_per_token
        kv = RewindablePaged(geometry, memory_bytes, size, device=k.device)
        kv.floor = self.recorded
        return kv

    def write(self, layer: int, end: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store ``[rows, H_kv, n, D]`` as the tokens before ``end``.

        Raises
        ------
        ValueError
            Other layers have more: pages take the newest tokens only.
        """
        if end != self._booked:
            raise ValueError(
                f"layer {layer} would have {end} tokens where others have {self._booked}: every "
                "layer must be updated in every forward, or use VmmCache"
            )
        num_tokens = k.shape[2]
        packed = [given.detach().transpose(1, 2).flatten(0, 1) for given in (k, v)]
        self.kv.write(layer, self.seqs, *packed, lens=[num_tokens] * self.num_rows)

    def view(self, layer: int) -> PagedView:
        """Pages and block tables of all rows."""
        view = self.kv.view(layer, self.seqs)
        assert isinstance(view, PagedView)
        return view


def gather(view: PagedView, first: int, length: int) -> Pair:
    """K and V ``[rows, H_kv, length − first, D]``: tokens from ``first`` on, copied together.

    Rows are equally long; ``first`` is stored in all of them.
    """
    size = view.k.shape[1]
    num_rows = len(view.block_table)
    pages = view.block_table[:, first // size : -(-length // size)].flatten()
    parts: list[torch.Tensor] = []
    for pool in (view.k, view.v):
        _, _, heads, dim = pool.shape
        out = pool.new_empty(heads, len(pages), size, dim)
        for head in range(heads):  # straight to its place: indexing all at once copies it again
            torch.index_select(pool[:, :, head], 0, pages, out=out[head])
        tokens = out.view(heads, num_rows, -1, dim).transpose(0, 1)
        parts.append(tokens.narrow(2, first % size, length - first))
    return parts[0], parts[1]
