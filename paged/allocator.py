"""The block-table backend's books: fixed-size pages anywhere, found through a table.

Physical slot of token ``t``: ``block_table[⌊t / B⌋] · B + t mod B``. A sequence of ``L``
tokens reserves ``B · ⌈L / B⌉`` of them. (Kwon et al., PagedAttention, SOSP 2023.)
"""

from __future__ import annotations

import math

from ..contract import Seq
from ..geometry import KVGeometry, check_geometry
from ..pages.allocator import PageAllocator
from ..pages.books import PageGroup
from ..pages.pool import PagePool
from ..sequences import at_least_one


class PagedAllocator(PageAllocator):
    """Pages of ``page_size`` tokens of all layers, or of as many as share a sliding window.

    Layers with different windows let go of pages at different times, so each window has block
    tables of its own. A page then holds ``gcd`` of the layer counts: Gemma-3's 10 global and 52
    local layers take 5 + 26 pages of 2 layers per crossing. Where layers of different windows
    also differ in shape, one page cannot serve both: windows are then not used.

    Parameters
    ----------
    geometry
        Bytes per token; ``SLOTS`` counts tokens alone.
    memory_bytes
        Size of the pool, rounded down to whole pages; None with a ``pool``.
    page_size
        Tokens per page, at least 1.
    limit
        Most tokens per sequence; None takes the model's context limit.
    pool
        Pages of the same size, shared with other allocators.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        memory_bytes: int | None,
        page_size: int = 16,
        *,
        limit: int | None = None,
        pool: PagePool | None = None,
    ) -> None:
        check_geometry(geometry)
        self.page_size = at_least_one("page_size", page_size)
        by_window = _layers_by_window(geometry)
        self.layers_per_page = math.gcd(*(len(layers) for layers in by_window.values()))
        token_bytes = geometry.bytes_per_token * self.layers_per_page // len(geometry.layers)
        groups = [
            PageGroup(layers, len(layers) // self.layers_per_page, token_bytes, window)
            for window, layers in by_window.items()
        ]
        page_bytes = self.page_size * token_bytes
        super().__init__(geometry, memory_bytes, page_bytes, groups, limit=limit, pool=pool)

    def slot(self, block_table: list[int], token: int) -> int:
        """Physical slot of a token, by the address equation above."""
        return block_table[token // self.page_size] * self.page_size + token % self.page_size

    def block_table(self, seq: Seq, layer: int = 0) -> list[int]:
        """Pages of a sequence in one layer, in token order; −1 where a window let go of them."""
        row = self._seqs.row(seq)
        g, column, _ = self._place_of(layer)
        gone, held = int(self._gone[g][row]), int(self._held[g][row])
        pages = self._table.pages[row, column, gone:held]
        return [-1] * gone + [int(page) for page in pages]

    def _place_of(self, layer: int) -> tuple[int, int, int]:
        """Group, column of the table, and place within a page, of a layer."""
        for g, group in enumerate(self.groups):
            if layer in group.layers:
                column, place = divmod(group.layers.index(layer), self.layers_per_page)
                return g, self._columns[g].start + column, place
        raise ValueError(f"layer {layer} does not exist")

    def _table_bytes(self) -> int:
        return 4 * (self._num_used + self._num_shared)


def _layers_by_window(geometry: KVGeometry) -> dict[int | None, tuple[int, ...]]:
    """Layers that let go of tokens together, in order of appearance."""
    windows = dict.fromkeys(shape.window for shape in geometry.layers)
    shapes = {(shape.kv_heads, shape.head_dim, shape.tensors) for shape in geometry.layers}
    if len(windows) > 1 and len(shapes) > 1:
        return {None: tuple(range(len(geometry.layers)))}
    return {
        window: tuple(i for i, shape in enumerate(geometry.layers) if shape.window == window)
        for window in windows
    }
