"""kvalloc: three memory backends for a KV cache behind one interface."""

from kvalloc.contract import (  # noqa: TID251  (pytest loads this file by path)
    Allocator,
    DenseView,
    KVCache,
    NeverFits,
    OutOfMemory,
    PagedView,
    Usage,
)

__version__ = "0.1.0"

__all__ = [
    "Allocator",
    "DenseView",
    "KVCache",
    "NeverFits",
    "OutOfMemory",
    "PagedView",
    "Usage",
]
