"""What lies in the memory of a cache that scrubs where no token is: nothing but zeros."""

from __future__ import annotations

import numpy as np

from kvalloc.paged import PagedKVCache
from kvalloc.vmm import VmmKVCache


def check_no_remains(cache: PagedKVCache | VmmKVCache) -> None:
    """Assert that pages are zero behind the tokens of their row, and free ones too when taken."""
    if isinstance(cache, VmmKVCache):
        _check_mapped(cache)
    else:
        _check_paged(cache)


def _check_mapped(cache: VmmKVCache) -> None:
    pool = cache.physical
    assert pool.unclean[pool.free_pages()].all(), "a free page would not be zeroed"
    for row in range(len(cache._length)):
        for g, group in enumerate(cache.groups):
            end = int(cache._ready[g][row])
            begin, first = divmod(int(cache._length[row]) * group.token_bytes, cache.page_bytes)
            for spot in cache._space.spots(row, g, begin, end) if begin < end else ():
                assert not spot[first:].any(), "remains behind the tokens of a row"


def _check_paged(cache: PagedKVCache) -> None:
    pools = (*cache._k, *cache._v)
    for pool in pools:
        assert not pool[cache.pool.free_pages().astype(np.int64)].any(), "remains in a free page"
    for _, row in cache._seqs.items():
        number, first = divmod(int(cache._length[row]), cache.page_size)
        for page in cache._table.pages[row, :, number].tolist() if first else ():
            for pool in pools:
                assert not pool[page, first:].any(), "remains behind the tokens of a row"
