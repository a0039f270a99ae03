"""Fixed-size pages anywhere, found through a block table, read by a paged kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .allocator import PagedAllocator

if TYPE_CHECKING:
    from .cache import PagedKVCache

__all__ = ["PagedAllocator", "PagedKVCache"]


def __getattr__(name: str) -> Any:
    if name == "PagedKVCache":  # imported on demand: the allocators need no torch
        from .cache import PagedKVCache

        return PagedKVCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
