"""The block-table backend's books: fixed-size pages anywhere, found through a table.

Physical slot of token ``t``: ``block_table[⌊t / B⌋] · B + t mod B``. A sequence of ``L``
tokens reserves ``B · ⌈L / B⌉`` of them. (Kwon et al., PagedAttention, SOSP 2023.)
"""

from __future__ import annotations

from ..contract import Seq
from ..geometry import KVGeometry
from ..paging import PageAllocator, PageGroup
from ..sequences import count


class PagedAllocator(PageAllocator):
    """Pages of ``page_size`` tokens, all layers of a token in one page.

    Parameters
    ----------
    geometry
        Bytes per token; ``SLOTS`` counts tokens alone.
    memory_bytes
        Size of the pool, rounded down to whole pages.
    page_size
        Tokens per page, at least 1.
    limit
        Most tokens per sequence; None takes the model's context limit.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        memory_bytes: int,
        page_size: int = 16,
        *,
        limit: int | None = None,
    ) -> None:
        self.page_size = count("page_size", page_size)
        if self.page_size < 1:
            raise ValueError("a page holds at least one token; give page_size >= 1")
        layers = tuple(range(len(geometry.layers)))
        groups = [PageGroup(layers, 1, geometry.bytes_per_token)]
        page_bytes = self.page_size * geometry.bytes_per_token
        super().__init__(geometry, memory_bytes, page_bytes, groups, limit=limit)

    def slot(self, block_table: list[int], token: int) -> int:
        """Physical slot of a token, by the address equation above."""
        return block_table[token // self.page_size] * self.page_size + token % self.page_size

    def block_table(self, seq: Seq) -> list[int]:
        """Pages of a sequence in token order."""
        return [int(page) for page in self._row_pages(self._seqs.row(seq), 0)]

    def _choose_row(self, tokens: int) -> int:
        return self._seqs.next_row()

    def _empty_row(self, row: int) -> None:
        for g, columns in enumerate(self._columns):
            self._num_gone -= int(self._gone[g][row]) * len(columns)
            self._give_up(self._row_pages(row, g))
            self._gone[g][row] = self._held[g][row] = self._ready[g][row] = 0

    def _table_bytes(self) -> int:
        return 4 * (self._num_used + self._num_shared)
